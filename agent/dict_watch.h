#pragma once

#include <Python.h>

#include <cstdint>

namespace cuvil::agent {

// Tells by one number whether any of the dicts in its care has changed, so that a thousand of them need not be looked
// at before every call.
//
// CPython 3.12 and later notify about the changes of a watched dict, just before they happen, wherever they move its
// version tag. Some dicts change all the time (the globals of a script that loops): after kNoisyAfter changes they are
// given up, and whoever relies on them has to look for himself. Without watchers (3.11, or all eight are taken) nothing
// is watched.
//
// What is watched is a dict, not an address: where another dict has taken the place of one that died, it has to be
// watched anew. Its tag is then another one than before.
//
// Threads: GIL held.
// Source:  PyDict_AddWatcher, CPython C API reference
class DictWatch {
 public:
  static constexpr uint32_t kNoisyAfter = 32;

  // From now on a change of the dict moves epoch(). False: it has to be looked at.
  static bool Watch(PyObject* dict);

  // Moves with each change of a watched dict that is not noisy, and with the end of any. Never 0.
  static uint64_t epoch() { return epoch_; }
  // A change that was told is still to come: other tools' callbacks run in between.
  static bool ChangeIsPending();
  // Moves, and the epoch with it for the last time, when a dict has become noisy.
  static uint64_t num_noisy() { return num_noisy_; }
  static bool IsNoisy(PyObject* dict);

 private:
  friend struct DictWatchState;
  inline static uint64_t epoch_ = 1;
  inline static uint64_t num_noisy_ = 0;
};

}  // namespace cuvil::agent
