#include "scheduler/profile_recorder.h"

#include <new>
#include <utility>

#include "absl/strings/str_cat.h"
#include "scheduler/monotonic_clock.h"

namespace cuvil::scheduler {
namespace {

// Numbers of the operating system and of Python are given again when a thread ends; these are not.
uint64_t ThreadSerial() {
  static std::atomic<uint64_t> next{1};
  thread_local const uint64_t serial = next.fetch_add(1, std::memory_order_relaxed);
  return serial;
}

}  // namespace

void ProfileTrack::Add(const ProfileRecord& record) noexcept {
  if (record.site == ProfileRecorder::kNoSite || !recorder_->Reserve()) {
    recorder_->CountDropped(1);
    return;
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  if (closed_) return;
  if (used_ == kChunkRecords) {
    // Without memory the interval is lost, never the call.
    std::unique_ptr<Chunk> chunk(new (std::nothrow) Chunk);
    if (chunk == nullptr) {
      recorder_->CountDropped(1);
      return;
    }
    std::unique_ptr<Chunk>& place = last_ == nullptr ? first_ : last_->next;
    place = std::move(chunk);
    last_ = place.get();
    used_ = 0;
  }
  last_->records[used_++] = record;
}

Profile::Track ProfileTrack::Close() {
  Profile::Track track;
  track.id = id_;
  track.name = name_;
  const std::lock_guard<std::mutex> lock(mutex_);
  closed_ = true;
  for (; first_ != nullptr; first_ = std::move(first_->next)) {
    const size_t count = first_.get() == last_ ? used_ : kChunkRecords;
    track.records.insert(track.records.end(), first_->records.begin(), first_->records.begin() + count);
  }
  last_ = nullptr;
  return track;
}

ProfileRecorder::ProfileRecorder(ProfileLimits limits) : limits_(limits), start_ns_(MonotonicNs()) {}

ProfileTrack* ProfileRecorder::FindTrack() {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = tracks_.find(ThreadSerial());
  return found == tracks_.end() ? nullptr : found->second.get();
}

ProfileTrack* ProfileRecorder::AddTrack(uint64_t id, std::string name) {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::unique_ptr<ProfileTrack>& track = tracks_[ThreadSerial()];
  if (track == nullptr) {
    track.reset(new ProfileTrack(this, id, std::move(name)));  // NOLINT: the constructor is private
    track_order_.push_back(track.get());
  }
  return track.get();
}

uint64_t ProfileRecorder::AddSite(ProfileSite site) {
  // Not unique: a key that is cheap to make, for few sites each.
  std::string name = absl::StrCat(site.module, "|", site.file, "|", site.line);
  const std::lock_guard<std::mutex> lock(mutex_);
  if (closed_) return kNoSite;
  std::vector<uint64_t>& same_name = sites_by_name_[std::move(name)];
  for (const uint64_t index : same_name) {
    if (sites_[index] == site) return index;
  }
  if (sites_.size() >= limits_.max_sites) return kNoSite;
  sites_.push_back(std::move(site));
  same_name.push_back(sites_.size() - 1);
  return sites_.size() - 1;
}

uint64_t ProfileRecorder::FindSites(uint64_t key, const std::string& module) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = groups_.find(key);
  if (found == groups_.end()) return kNoSite;
  for (const auto& [name, first] : found->second) {
    if (name == module) return first;
  }
  return kNoSite;
}

uint64_t ProfileRecorder::InsertSites(uint64_t key, const std::string& module, std::vector<ProfileSite> sites) {
  const std::lock_guard<std::mutex> lock(mutex_);
  // Another thread that runs the same plan may have come first; two groups of equal sites do no harm.
  if (closed_ || sites_.size() + sites.size() > limits_.max_sites) return kNoSite;
  const uint64_t first = sites_.size();
  for (ProfileSite& site : sites) sites_.push_back(std::move(site));
  groups_[key].emplace_back(module, first);
  return first;
}

Profile ProfileRecorder::Close() {
  Profile profile;
  profile.start_ns = start_ns_;
  const std::lock_guard<std::mutex> lock(mutex_);
  for (ProfileTrack* track : track_order_) profile.tracks.push_back(track->Close());
  closed_ = true;
  profile.sites = std::move(sites_);
  sites_.clear();
  sites_by_name_.clear();
  groups_.clear();
  profile.num_dropped = num_dropped_.load(std::memory_order_relaxed);
  profile.end_ns = MonotonicNs();
  return profile;
}

}  // namespace cuvil::scheduler
