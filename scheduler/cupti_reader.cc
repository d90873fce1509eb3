#include "scheduler/cupti_reader.h"

#include <cxxabi.h>

#include <cstdlib>
#include <memory>
#include <set>
#include <string_view>

#include "absl/strings/str_cat.h"
#include "scheduler/cupti_records.h"

namespace cuvil::scheduler {
namespace {

constexpr int kNoMoreRecords = 12;  // CUPTI_ERROR_MAX_LIMIT_REACHED: the regular end of a buffer

// By CUpti_ActivityMemcpyKind.
constexpr std::string_view kCopyNames[] = {"copy",
                                           "copy host to device",
                                           "copy device to host",
                                           "copy host to array",
                                           "copy array to host",
                                           "copy array to array",
                                           "copy array to device",
                                           "copy device to array",
                                           "copy device to device",
                                           "copy host to host",
                                           "copy between devices"};

std::string Readable(const char* name) {
  int status = 0;
  const std::unique_ptr<char, void (*)(void*)> text(abi::__cxa_demangle(name, nullptr, nullptr, &status), std::free);
  return status == 0 && text != nullptr ? text.get() : name;
}

class Reader {
 public:
  explicit Reader(const CuptiApi& api) : api_(api) {}

  void Read(CuptiBufferView buffer) {
    if (buffer.empty()) return;
    void* record = nullptr;
    int result = 0;
    while ((result = api_.cuptiActivityGetNextRecord(buffer.data(), buffer.size(), &record)) == 0) Take(record);
    if (result != kNoMoreRecords) ++result_.num_unreadable;
  }

  CuptiActivities Finish() { return std::move(result_); }

 private:
  void Take(const void* record) {
    switch (static_cast<const CuptiRecord*>(record)->kind) {
      case CuptiActivityKind::kKernel:
      case CuptiActivityKind::kConcurrentKernel:
        return TakeKernel(*static_cast<const CuptiKernelRecord*>(record));
      case CuptiActivityKind::kMemcpy: {
        const auto& copy = *static_cast<const CuptiCopyRecord*>(record);
        return TakeTransfer(copy, DeviceActivityKind::kCopy, CopyName(copy.copy_kind));
      }
      case CuptiActivityKind::kMemcpyPeer: {
        const auto& copy = *static_cast<const CuptiPeerCopyRecord*>(record);
        return TakeTransfer(copy, DeviceActivityKind::kCopy, CopyName(copy.copy_kind));
      }
      case CuptiActivityKind::kMemset:
        return TakeTransfer(*static_cast<const CuptiMemsetRecord*>(record), DeviceActivityKind::kFill, "fill");
      case CuptiActivityKind::kExternalCorrelation: {
        const auto& external = *static_cast<const CuptiExternalCorrelationRecord*>(record);
        if (external.external_kind == kCuptiOwnCorrelation) {
          result_.external_ids[external.correlation] = external.external_id;
        }
        return;
      }
      case CuptiActivityKind::kDriver:
      case CuptiActivityKind::kRuntime: {
        const auto& call = *static_cast<const CuptiCallRecord*>(record);
        result_.threads[call.correlation] = call.thread;
        return;
      }
      default:
        return;
    }
  }

  template <typename Record>
  CuptiActivity& Add(const Record& record, DeviceActivityKind kind) {
    CuptiActivity& activity = result_.activities.emplace_back();
    activity.kind = kind;
    activity.start = record.start;
    activity.end = record.end;
    activity.graph_node = record.graph_node;
    activity.correlation = record.correlation;
    activity.device = record.device;
    activity.stream = record.stream;
    return activity;
  }

  void TakeKernel(const CuptiKernelRecord& record) {
    const uint32_t name = KernelName(record.name);
    CuptiActivity& activity = Add(record, DeviceActivityKind::kKernel);
    activity.name = name;
    for (size_t i = 0; i < 3; ++i) {
      activity.grid[i] = static_cast<uint32_t>(record.grid[i]);
      activity.block[i] = static_cast<uint32_t>(record.block[i]);
    }
  }

  template <typename Record>
  void TakeTransfer(const Record& record, DeviceActivityKind kind, std::string_view name) {
    const uint32_t number = Name(std::string(name));
    CuptiActivity& activity = Add(record, kind);
    activity.bytes = record.bytes;
    activity.name = number;
  }

  static std::string_view CopyName(uint8_t kind) { return kCopyNames[kind < std::size(kCopyNames) ? kind : 0]; }

  // CUPTI gives all records of a kernel one pointer, whose text does not change while CUPTI is attached.
  uint32_t KernelName(const char* name) {
    const auto [found, inserted] = names_by_pointer_.try_emplace(name, 0);
    if (inserted) found->second = Name(name == nullptr ? "(unnamed kernel)" : Readable(name));
    return found->second;
  }

  uint32_t Name(std::string name) {
    const auto [found, inserted] = names_.try_emplace(std::move(name), static_cast<uint32_t>(result_.names.size()));
    if (inserted) result_.names.push_back(found->first);
    return found->second;
  }

  const CuptiApi& api_;
  CuptiActivities result_;
  absl::flat_hash_map<const char*, uint32_t> names_by_pointer_;
  absl::flat_hash_map<std::string, uint32_t> names_;
};

}  // namespace

size_t CuptiActivities::CountThreads() const {
  std::set<uint32_t> found;
  for (const CuptiActivity& activity : activities) {
    if (const auto thread = threads.find(activity.correlation); thread != threads.end()) found.insert(thread->second);
  }
  return found.size();
}

CuptiActivities ReadCuptiBuffers(const CuptiApi& api, absl::Span<const CuptiBufferView> buffers) {
  Reader reader(api);
  for (const CuptiBufferView buffer : buffers) reader.Read(buffer);
  return reader.Finish();
}

}  // namespace cuvil::scheduler
