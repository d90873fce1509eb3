#include "agent/dict_watch.h"

#if PY_VERSION_HEX >= 0x030C0000

#include <algorithm>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "agent/boundary.h"
#include "agent/cpython_compat.h"
#include "agent/process_lifetime.h"
#include "agent/py_ref.h"

namespace cuvil::agent {

struct DictWatchState {
  int watcher = -1;
  std::unordered_map<PyObject*, uint32_t> num_changes;
  std::unordered_set<PyObject*> noisy;

  bool tried = false;

  static DictWatchState& Get() {
    static ProcessLifetime<DictWatchState> state;
    return *state;
  }

  // The watcher's number; negative: there is none.
  int Watcher() {
    if (std::exchange(tried, true)) return watcher;
    const ErrorScope errors;
    watcher = PyDict_AddWatcher(OnEvent);
    if (watcher < 0) PyErr_Clear();  // all are taken
    // If it does not work, it stays registered, but nothing is marked with its number.
    if (watcher >= 0 && !Works()) watcher = -1;
    return watcher;
  }

  // Whether every kind of change is told, on a dict of our own.
  bool Works() const {
    const OwnedRef dict = OwnedRef::Steal(PyDict_New());
    const OwnedRef other = OwnedRef::Steal(PyDict_New());
    const OwnedRef key = OwnedRef::Steal(PyUnicode_FromString("key"));
    bool works = dict && other && key && PyDict_SetItem(other.get(), Py_None, Py_None) == 0 &&
                 PyDict_Watch(watcher, dict.get()) == 0;
    const auto moves = [&](auto change) {
      const uint64_t before = DictWatch::epoch_;
      works = works && change() && DictWatch::epoch_ != before;
    };
    moves([&] { return PyDict_SetItem(dict.get(), key.get(), Py_None) == 0; });
    moves([&] { return PyDict_SetItem(dict.get(), key.get(), Py_True) == 0; });
    moves([&] { return PyDict_DelItem(dict.get(), key.get()) == 0; });
    moves([&] { return PyDict_Update(dict.get(), other.get()) == 0; });
    moves([&] {
      PyDict_Clear(dict.get());
      return true;
    });
    const uint64_t before = DictWatch::epoch_;
    works = works && PyDict_GetItemWithError(dict.get(), key.get()) == nullptr && DictWatch::epoch_ == before;
    if (PyErr_Occurred() != nullptr) PyErr_Clear();
    return works;
  }

  static int OnEvent(PyDict_WatchEvent event, PyObject* dict, PyObject*, PyObject*) noexcept {
    bool is_noisy = false;
    // Without memory to count in, a noisy dict is only not found out.
    static_cast<void>(ContainStatus([&] {
      DictWatchState& state = Get();
      if (event == PyDict_EVENT_DEALLOCATED) {
        state.num_changes.erase(dict);
        state.noisy.erase(dict);
        std::erase_if(state.changing, [dict](const Change& change) { return change.dict == dict; });
        return absl::OkStatus();
      }
      is_noisy = state.noisy.contains(dict);
      if (is_noisy) return absl::OkStatus();
      std::erase_if(state.changing, [dict](const Change& c) { return c.dict == dict || !c.IsPending(); });
      state.changing.push_back({dict, DictTag(reinterpret_cast<PyDictObject*>(dict))});
      if (++state.num_changes[dict] == DictWatch::kNoisyAfter) {
        state.noisy.insert(dict);
        ++DictWatch::num_noisy_;
      }
      return absl::OkStatus();
    }));
    if (!is_noisy) ++DictWatch::epoch_;
    return 0;
  }

  struct Change {
    PyObject* dict;
    uint64_t tag_before;
    bool IsPending() const { return DictTag(reinterpret_cast<PyDictObject*>(dict)) == tag_before; }
  };
  // The last change, and those that were still to come when it was told; of dicts that live.
  std::vector<Change> changing;
};

bool DictWatch::Watch(PyObject* dict) {
  DictWatchState& state = DictWatchState::Get();
  const int watcher = state.Watcher();
  if (watcher < 0 || !PyDict_Check(dict) || state.noisy.contains(dict)) return false;
  if (PyDict_Watch(watcher, dict) == 0) return true;
  PyErr_Clear();
  return false;
}

bool DictWatch::IsNoisy(PyObject* dict) { return DictWatchState::Get().noisy.contains(dict); }

bool DictWatch::ChangeIsPending() {
  return std::ranges::any_of(DictWatchState::Get().changing, &DictWatchState::Change::IsPending);
}

}  // namespace cuvil::agent

#else

namespace cuvil::agent {

bool DictWatch::Watch(PyObject*) { return false; }
bool DictWatch::IsNoisy(PyObject*) { return false; }
bool DictWatch::ChangeIsPending() { return false; }

}  // namespace cuvil::agent

#endif
