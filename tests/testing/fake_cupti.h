// A CUPTI that records what tests tell it a device has done, hands it over when it is flushed, and keeps a log of what
// it was asked.
//
// Records are laid out by their own offsets, as cupti.h has them, and end where CUDA 13.2's end. One fake at a time:
// the library's functions are plain pointers.
#pragma once

#include <chrono>
#include <cstdint>
#include <cstring>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "scheduler/cupti_api.h"

namespace cuvil::testing {

struct FakeCupti {
  FakeCupti() { current = this; }
  ~FakeCupti() { current = nullptr; }
  FakeCupti(const FakeCupti&) = delete;
  FakeCupti& operator=(const FakeCupti&) = delete;

  std::vector<std::string> log;
  std::string failing;  // the function that fails; with a space behind it, and an argument, that call of it
  int error = 999;
  size_t num_dropped = 0;      // what the next buffer is told
  size_t truncated_bytes = 0;  // missing at the end of the next buffer
  uint64_t clock = 1'000'000;  // cuptiGetTimestamp, which counts on by itself
  uint64_t clock_step = 1000;
  bool real_time = false;  // the clock is the system's
  bool gives_buffers_back = true;
  uint32_t thread = 1;          // that launches
  bool finalize_mends = false;  // nothing fails any more after it
  std::map<void*, uint64_t> node_ids;

  static constexpr int kKernel = 10, kMemcpy = 1, kMemset = 2, kPeer = 22, kExternal = 39, kRuntime = 5;

  // One record: numbers of 1 to 8 bytes at their offsets.
  struct Record {
    explicit Record(int kind) : bytes(SizeOf(kind)) { Put(0, static_cast<uint32_t>(kind)); }
    template <typename T>
    Record& Put(size_t offset, T value) {
      std::memcpy(bytes.data() + offset, &value, sizeof(value));
      return *this;
    }
    std::vector<uint8_t> bytes;
  };
  static size_t SizeOf(int kind) {
    switch (kind) {
      case kKernel:
        return 224;
      case kMemcpy:
        return 96;
      case kMemset:
        return 88;
      case kPeer:
        return 96;
      case kExternal:
        return 24;
      case kRuntime:
        return 40;
      default:
        return 0;
    }
  }

  static Record Kernel(const char* name, uint64_t start, uint64_t end, uint32_t correlation, uint64_t graph_node = 0) {
    Record record(kKernel);
    record.Put(16, start).Put(24, end).Put(40, uint32_t{1}).Put(48, uint32_t{7});
    for (uint32_t i = 0; i < 3; ++i) record.Put(52 + 4 * i, i + 1).Put(64 + 4 * i, 32 * (i + 1));
    return record.Put(92, correlation).Put(104, name).Put(144, graph_node);
  }
  static Record Copy(uint8_t kind, uint64_t bytes, uint64_t start, uint64_t end, uint32_t correlation) {
    Record record(kMemcpy);
    record.Put(4, kind).Put(8, bytes).Put(16, start).Put(24, end).Put(40, uint32_t{7}).Put(44, correlation);
    return record;
  }
  static Record External(int kind, uint64_t id, uint32_t correlation) {
    Record record(kExternal);
    record.Put(4, kind).Put(8, id).Put(16, correlation);
    return record;
  }

  // What a device will have done by the next flush.
  void Add(const Record& record) { pending.push_back(record); }
  // A launch by the calling thread: the records of a call, with the number that was pushed last.
  uint32_t Launch(const char* name, uint64_t start, uint64_t end, uint64_t graph_node = 0) {
    const uint32_t correlation = ++last_correlation;
    for (const auto& [kind, ids] : pushed) {
      if (!ids.empty()) Add(External(kind, ids.back(), correlation));
    }
    Add(Record(kRuntime).Put(28, thread).Put(32, correlation));
    Add(Kernel(name, start, end, correlation, graph_node));
    return correlation;
  }
  // Instantiation made `node` of `original`.
  void TellClone(void* node, void* original) {
    struct {
      void *graph, *original_graph, *node, *original_node;
    } graph{nullptr, nullptr, node, original};
    struct {
      void *context, *resource, *descriptor;
    } data{nullptr, nullptr, &graph};
    if (callback != nullptr && callback_enabled) callback(callback_data, 3, 20, &data);
  }

  // A thread enters or leaves a call of a domain.
  void TellCall(int domain, int site) {
    if (callback != nullptr) callback(callback_data, domain, 1, &site);
  }

  // What a buffer holds now; false if CUPTI got none.
  bool Deliver() {
    if (pending.empty() || requested == nullptr) return true;
    uint8_t* buffer = nullptr;
    size_t size_bytes = 0, max_records = 0, used = 0;
    requested(&buffer, &size_bytes, &max_records);
    if (buffer == nullptr) return false;
    for (const Record& record : pending) {
      if (used + record.bytes.size() > size_bytes) break;
      std::memcpy(buffer + used, record.bytes.data(), record.bytes.size());
      used += record.bytes.size();
    }
    pending.clear();
    last_buffer = {buffer, size_bytes, used - truncated_bytes};
    if (gives_buffers_back) GiveBack();
    return true;
  }
  struct Lent {
    uint8_t* buffer = nullptr;
    size_t size_bytes = 0, valid_bytes = 0;
  };
  void GiveBack() { completed(nullptr, 0, last_buffer.buffer, last_buffer.size_bytes, last_buffer.valid_bytes); }

  int Note(const std::string& call) {
    log.push_back(call);
    return failing == call || failing == call.substr(0, call.find(' ')) ? error : 0;
  }
  static std::string Text(uint64_t number) { return " " + std::to_string(number); }

  static scheduler::CuptiApi Api() {
    scheduler::CuptiApi api;
    api.cuptiGetResultString = [](int result, const char** text) {
      *text = result == 999 ? "CUPTI_ERROR_UNKNOWN" : "CUPTI_ERROR";
      return 0;
    };
    api.cuptiGetVersion = [](uint32_t* version) {
      *version = 130000;
      return 0;
    };
    api.cuptiGetTimestamp = [](uint64_t* timestamp) {
      *timestamp = current->clock += current->clock_step;
      if (current->real_time) {
        *timestamp =
            static_cast<uint64_t>(std::chrono::system_clock::now().time_since_epoch() / std::chrono::nanoseconds(1));
      }
      return current->failing == "cuptiGetTimestamp" ? current->error : 0;
    };
    api.cuptiSubscribe = [](void** subscriber, scheduler::CuptiCallback callback, void* data) {
      const int result = current->Note("subscribe");
      if (result != 0) return result;
      *subscriber = current;
      current->callback = callback;
      current->callback_data = data;
      return 0;
    };
    api.cuptiUnsubscribe = [](void*) {
      current->callback = nullptr;
      current->callback_enabled = false;
      return current->Note("unsubscribe");
    };
    api.cuptiEnableDomain = [](uint32_t enable, void*, int domain) {
      return current->Note("domain " + std::to_string(domain) + Text(enable));
    };
    api.cuptiEnableCallback = [](uint32_t enable, void*, int domain, uint32_t id) {
      current->callback_enabled = enable != 0 && domain == 3 && id == 20;
      return current->Note("callback" + Text(enable));
    };
    api.cuptiGetGraphNodeId = [](void* node, uint64_t* id) {
      const auto found = current->node_ids.find(node);
      if (found == current->node_ids.end()) return 1;
      *id = found->second;
      return 0;
    };
    api.cuptiActivityRegisterCallbacks = [](scheduler::CuptiBufferRequested requested,
                                            scheduler::CuptiBufferCompleted completed) {
      const int result = current->Note("register");
      if (result != 0) return result;
      current->requested = requested;
      current->completed = completed;
      return 0;
    };
    api.cuptiActivityEnable = [](int kind) { return current->Note("enable" + Text(static_cast<uint64_t>(kind))); };
    api.cuptiActivityDisable = [](int kind) { return current->Note("disable" + Text(static_cast<uint64_t>(kind))); };
    api.cuptiActivityFlushAll = [](uint32_t flag) {
      const int result = current->Note("flush" + Text(flag));
      current->Deliver();
      return result;
    };
    api.cuptiActivityGetNextRecord = [](uint8_t* buffer, size_t valid_bytes, void** record) {
      uint8_t* next = buffer;
      if (*record != nullptr) {
        next = static_cast<uint8_t*>(*record);
        next += SizeOf(*reinterpret_cast<int*>(next));
      }
      const auto left = static_cast<size_t>(buffer + valid_bytes - next);
      if (left == 0) return 12;
      if (left < 4 || left < SizeOf(*reinterpret_cast<int*>(next))) return 1;
      *record = next;
      return 0;
    };
    api.cuptiActivityGetNumDroppedRecords = [](void*, uint32_t, size_t* count) {
      *count = std::exchange(current->num_dropped, 0);
      return 0;
    };
    api.cuptiActivityPushExternalCorrelationId = [](int kind, uint64_t id) {
      if (current->failing == "push") return current->error;
      current->pushed[kind].push_back(id);
      return 0;
    };
    api.cuptiActivityPopExternalCorrelationId = [](int kind, uint64_t* id) {
      std::vector<uint64_t>& ids = current->pushed[kind];
      if (ids.empty()) return 1;
      *id = ids.back();
      ids.pop_back();
      return 0;
    };
    api.cuptiFinalize = [] {
      current->requested = nullptr;
      const int result = current->Note("finalize");
      if (current->finalize_mends) current->failing.clear();
      return result;
    };
    return api;
  }

  std::map<int, std::vector<uint64_t>> pushed;  // by kind; one thread's
  std::vector<Record> pending;
  uint32_t last_correlation = 0;
  Lent last_buffer;
  scheduler::CuptiBufferRequested requested = nullptr;
  scheduler::CuptiBufferCompleted completed = nullptr;
  scheduler::CuptiCallback callback = nullptr;
  void* callback_data = nullptr;
  bool callback_enabled = false;

 private:
  static inline FakeCupti* current = nullptr;
};

}  // namespace cuvil::testing
