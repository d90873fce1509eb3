#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace cuvil::agent {

// Decides which of a module's unplanned calls are worth a trace; constant time and memory however signatures change.
//
// A signature is traced when it is seen often enough: at the first or second sighting at first, and after twice as
// many each time a capture was made that no call ever used. While many calls bring signatures that were not seen
// before, four times as many are asked for: a repetition among them is chance, and 200 random lengths may cost no more
// than two eager calls in all. A refusal is reconsidered after a number of calls that
// doubles. A module that is refused and has no plan in use skips even the hashing of its signatures meanwhile.
//
// Threads: thread-compatible (the agent uses it under the GIL).
class SignatureBook {
 public:
  struct Options {
    uint32_t first_sighting = 2;        // traced when seen this often
    uint32_t free_per_signature = 1;    // captures a signature may waste before it has to be seen more often
    uint32_t free_per_module = 4;       // the same over all of the module's signatures
    uint32_t first_refusal_calls = 16;  // calls until the first refusal is reconsidered
    uint32_t retries = 3;               // refusals in a row that may ask for the very next call
    bool mind_novelty = true;
    static Options Background() { return Options(); }
    // Deterministic for tests: traced at the first call, and again at once whenever a guarded state changed.
    static Options Sync() { return Options{1, 8, 64, 4, 3, false}; }
  };

  // Calls that need gradients and calls that do not are refused for different reasons, so each kind backs off alone.
  enum class Mode : uint8_t { kInference, kGrad };

  explicit SignatureBook(Options options) : options_(options) {}

  // True while the module backs off as a whole; counts the call. The hot path of refused modules.
  bool Skip(Mode mode) {
    uint64_t& left = skip_[static_cast<size_t>(mode)];
    if (left == 0) return false;
    --left;
    return true;
  }

  // Counts a call of this signature that no plan could take; true iff it should be traced.
  bool ShouldTrace(uint64_t hash);

  void Captured(uint64_t hash);
  // `retry`: the refusing state settles by itself, so the next call may be traced.
  void Refused(uint64_t hash, Mode mode, bool retry);
  // A plan of this signature answered a call.
  void Served(uint64_t hash);
  // A plan of this signature was wrong: never trace it again.
  void Ban(uint64_t hash);
  bool IsBanned(uint64_t hash) const;
  // True iff the last word about this signature, or about the module as a whole, was a refusal: the modules inside
  // are then worth plans of their own.
  bool IsRefused(uint64_t hash, Mode mode) const;

  bool in_use() const { return in_use_; }

 private:
  // 64 signatures within their back-off are remembered; one that is forgotten starts over, which costs one trace.
  static constexpr size_t kSlots = 64;
  static constexpr size_t kWays = 4;
  static constexpr size_t kMaxBanned = 16;

  struct Record {
    uint64_t hash = 0;
    uint64_t last_tick = 0;  // 0: the slot is free
    uint64_t next_tick = 0;  // refused: not before this tick
    uint32_t sightings = 0;  // since the last trace
    uint32_t unused = 0;     // captures since a plan of it last served
    uint32_t refusals = 0;   // in a row
  };

  Record& Find(uint64_t hash);
  const Record* Peek(uint64_t hash) const;

  Options options_;
  uint64_t tick_ = 0;
  std::array<uint64_t, 2> skip_{};
  std::array<uint32_t, 2> refusals_{};  // in a row, over all signatures
  uint32_t unused_ = 0;
  uint32_t novelty_ = 0;  // share of new signatures among the last calls without a plan, in 1/256, decaying by eighths
  bool in_use_ = false;
  bool all_banned_ = false;
  std::vector<Record> records_;  // kSlots once anything was seen; modules that are never outermost stay small
  std::vector<uint64_t> banned_;
};

}  // namespace cuvil::agent
