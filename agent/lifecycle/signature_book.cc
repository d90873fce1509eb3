#include "agent/lifecycle/signature_book.h"

#include <algorithm>

namespace cuvil::agent {
namespace {

// 2^12 sightings, and 16 << 16 calls: large enough to cost nothing, small enough to come back within a long run.
constexpr uint32_t kMaxSightingShift = 12;
constexpr uint32_t kMaxRefusalShift = 16;

// More than a quarter of the last calls were new: three new ones in a row, or a quarter of the calls for a long time.
constexpr uint32_t kMuchNovelty = 64;
constexpr uint32_t kNoveltyShift = 2;

}  // namespace

SignatureBook::Record& SignatureBook::Find(uint64_t hash) {
  if (records_.empty()) records_.resize(kSlots);
  const size_t set = (hash ^ (hash >> 32)) % (kSlots / kWays) * kWays;
  Record* oldest = &records_[set];
  for (size_t i = set; i < set + kWays; ++i) {
    Record& record = records_[i];
    if (record.last_tick != 0 && record.hash == hash) return record;
    if (record.last_tick < oldest->last_tick) oldest = &record;
  }
  *oldest = Record();
  oldest->hash = hash;
  return *oldest;
}

const SignatureBook::Record* SignatureBook::Peek(uint64_t hash) const {
  if (records_.empty()) return nullptr;
  const size_t set = (hash ^ (hash >> 32)) % (kSlots / kWays) * kWays;
  for (size_t i = set; i < set + kWays; ++i) {
    if (records_[i].last_tick != 0 && records_[i].hash == hash) return &records_[i];
  }
  return nullptr;
}

bool SignatureBook::ShouldTrace(uint64_t hash) {
  ++tick_;
  if (IsBanned(hash)) return false;
  Record& record = Find(hash);
  const bool is_new = record.last_tick == 0;
  record.last_tick = tick_;
  ++record.sightings;
  novelty_ = novelty_ * 7 / 8 + (is_new ? 32 : 0);
  if (tick_ < record.next_tick) return false;
  const uint32_t by_signature =
      record.unused > options_.free_per_signature ? record.unused - options_.free_per_signature : 0;
  const uint32_t by_module = unused_ > options_.free_per_module ? (unused_ - options_.free_per_module) / 2 : 0;
  uint32_t shift = std::min(std::max(by_signature, by_module), kMaxSightingShift);
  if (options_.mind_novelty && novelty_ > kMuchNovelty) shift = std::max(shift, kNoveltyShift);
  return record.sightings >= uint64_t{options_.first_sighting} << shift;
}

void SignatureBook::Captured(uint64_t hash) {
  Record& record = Find(hash);
  record.last_tick = std::max<uint64_t>(tick_, 1);
  record.sightings = 0;
  record.refusals = 0;
  record.next_tick = 0;
  ++record.unused;
  ++unused_;
  refusals_ = {};
  skip_ = {};
}

void SignatureBook::Refused(uint64_t hash, Mode mode, bool retry) {
  Record& record = Find(hash);
  record.last_tick = std::max<uint64_t>(tick_, 1);
  ++record.refusals;
  if (retry && record.refusals <= options_.retries) {
    record.next_tick = tick_ + 1;
    return;
  }
  const uint32_t shift = std::min(record.refusals - 1, kMaxRefusalShift);
  record.next_tick = tick_ + (uint64_t{options_.first_refusal_calls} << shift);
  if (in_use_) return;
  uint32_t& in_a_row = refusals_[static_cast<size_t>(mode)];
  skip_[static_cast<size_t>(mode)] = uint64_t{options_.first_refusal_calls} << std::min(in_a_row, kMaxRefusalShift);
  ++in_a_row;
  // Calls that are skipped do not tick, so the record's own date would come that much later.
  record.next_tick = 0;
}

void SignatureBook::Served(uint64_t hash) {
  in_use_ = true;
  unused_ = 0;
  Record& record = Find(hash);
  record.last_tick = std::max<uint64_t>(tick_, 1);
  record.unused = 0;
}

void SignatureBook::Ban(uint64_t hash) {
  if (IsBanned(hash)) return;
  if (banned_.size() == kMaxBanned) {
    all_banned_ = true;
  } else {
    banned_.push_back(hash);
  }
}

bool SignatureBook::IsBanned(uint64_t hash) const {
  return all_banned_ || (!banned_.empty() && std::find(banned_.begin(), banned_.end(), hash) != banned_.end());
}

bool SignatureBook::IsRefused(uint64_t hash, Mode mode) const {
  if (IsBanned(hash)) return true;
  if (!in_use_ && refusals_[static_cast<size_t>(mode)] != 0) return true;
  const Record* record = Peek(hash);
  return record != nullptr && record->refusals != 0 && tick_ < record->next_tick;
}

}  // namespace cuvil::agent
