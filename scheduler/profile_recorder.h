// Collects what ran when: intervals on tracks, each of which points at a site that says what it was.
//
// A track is a thread, or whatever else runs one thing after another; a site is a step of a plan or a call of a module,
// with the Python line that it stands for. Memory is bounded: what finds no room is counted.
//
// Threads:   thread-safe. A track's lock is its own: threads that record do not meet.
// Ownership: tracks belong to the recorder; whoever adds to one keeps the recorder alive.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace cuvil::scheduler {

enum class ProfileKind : uint8_t {
  kCall,         // a module call that Python code answered
  kPlan,         // a module call that a plan answered
  kPreparation,  // a module call that was traced, or that eager and its plan answered to be compared
  kStep,         // one step of a plan
};

struct ProfileSite {
  ProfileKind kind{};
  std::string module;       // path in the model, behind the type of the outermost module
  std::string module_type;  // of calls
  std::string file;         // the user's line: of the call, or of the operator
  int line = 0;
  std::string function;
  std::string op;  // kStep: "aten::linear"

  bool operator==(const ProfileSite&) const = default;
};

struct ProfileRecord {
  uint64_t start_ns = 0;
  uint64_t end_ns = 0;
  uint64_t site = 0;  // position in Profile::sites
};

// What a recorder has collected.
struct Profile {
  struct Track {
    std::string name;
    uint64_t id = 0;  // threading.get_ident() of a thread
    std::vector<ProfileRecord> records;
  };
  uint64_t start_ns = 0;
  uint64_t end_ns = 0;
  std::vector<ProfileSite> sites;
  std::vector<Track> tracks;
  uint64_t num_dropped = 0;  // intervals that found no room
};

struct ProfileLimits {
  uint64_t max_records = uint64_t{1} << 20;  // 24 MiB
  uint64_t max_sites = uint64_t{1} << 17;
};

class ProfileRecorder;

// One thread's intervals, in the order in which they ended.
class ProfileTrack {
 public:
  // After the recorder was closed it does nothing.
  void Add(const ProfileRecord& record) noexcept;

 private:
  friend class ProfileRecorder;
  static constexpr size_t kChunkRecords = 1024;
  struct Chunk {
    std::array<ProfileRecord, kChunkRecords> records;
    std::unique_ptr<Chunk> next;
  };

  ProfileTrack(ProfileRecorder* recorder, uint64_t id, std::string name)
      : recorder_(recorder), id_(id), name_(std::move(name)) {}
  // Hands over what there is; what comes later is ignored.
  Profile::Track Close();

  ProfileRecorder* const recorder_;
  const uint64_t id_;
  const std::string name_;
  // Not absl's: when two threads meet at one for the first time, ThreadSanitizer sees a race inside of abseil.
  std::mutex mutex_;  // of all below; nothing is called under it
  std::unique_ptr<Chunk> first_;
  Chunk* last_ = nullptr;
  size_t used_ = kChunkRecords;  // of the last chunk
  bool closed_ = false;
};

class ProfileRecorder {
 public:
  static constexpr uint64_t kNoSite = ~uint64_t{0};

  explicit ProfileRecorder(ProfileLimits limits = {});
  ProfileRecorder(const ProfileRecorder&) = delete;
  ProfileRecorder& operator=(const ProfileRecorder&) = delete;

  // The calling thread's track. Null if it has none yet.
  ProfileTrack* FindTrack();
  ProfileTrack* AddTrack(uint64_t id, std::string name);

  // The number of a site; equal sites share one. kNoSite if there is no room or the profile has ended: its intervals
  // are counted as dropped.
  uint64_t AddSite(ProfileSite site);
  // Sites that belong together, a plan's steps: the number of the first, the others follow it. Looked up by `key` and
  // `module` alone; `make` is called if they are not there.
  template <typename Make>
  uint64_t AddSites(uint64_t key, const std::string& module, Make&& make) {
    if (const uint64_t known = FindSites(key, module); known != kNoSite) return known;
    return InsertSites(key, module, make());
  }

  void CountDropped(uint64_t count) { num_dropped_.fetch_add(count, std::memory_order_relaxed); }

  // Ends the profile and hands over what there is; what comes later is ignored. Once.
  Profile Close();

 private:
  friend class ProfileTrack;
  uint64_t FindSites(uint64_t key, const std::string& module);
  uint64_t InsertSites(uint64_t key, const std::string& module, std::vector<ProfileSite> sites);
  // Room for one record.
  bool Reserve() { return num_records_.fetch_add(1, std::memory_order_relaxed) < limits_.max_records; }

  const ProfileLimits limits_;
  const uint64_t start_ns_;
  // Counters: no other memory depends on them.
  std::atomic<uint64_t> num_records_{0};
  std::atomic<uint64_t> num_dropped_{0};

  std::mutex mutex_;  // of all below; taken before a track's
  std::vector<ProfileSite> sites_;
  std::unordered_map<std::string, std::vector<uint64_t>> sites_by_name_;
  std::unordered_map<uint64_t, std::vector<std::pair<std::string, uint64_t>>> groups_;
  std::unordered_map<uint64_t, std::unique_ptr<ProfileTrack>> tracks_;  // by thread
  std::vector<ProfileTrack*> track_order_;
  bool closed_ = false;  // the sites have been handed over: a later one would get the number of another
};

}  // namespace cuvil::scheduler
