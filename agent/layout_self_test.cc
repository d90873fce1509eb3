#include "agent/layout_self_test.h"

#include <cstring>
#include <string_view>

#include "agent/assumptions.h"
#include "agent/cpython_compat_internal.h"
#include "agent/cpython_private.h"
#include "agent/heap_log.h"
#include "agent/object_layouts.h"
#include "agent/py_ref.h"

// After Python.h, which it needs:
#include <structmember.h>

namespace cuvil::agent {
namespace {

OwnedRef Text(const char* text) { return OwnedRef::Steal(PyUnicode_FromString(text)); }
OwnedRef Number(long number) { return OwnedRef::Steal(PyLong_FromLong(number)); }
OwnedRef Attribute(PyObject* object, const char* name) { return OwnedRef::Steal(PyObject_GetAttrString(object, name)); }
OwnedRef Instance(PyObject* type) { return OwnedRef::Steal(PyObject_CallNoArgs(type)); }
PyTypeObject* AsType(PyObject* object) { return reinterpret_cast<PyTypeObject*>(object); }

// The word at `offset`; a corrupted assumption looks one word before it, which is inside of every object.
PyObject* WordAt(Assumption assumption, PyObject* object, size_t offset) {
  PyObject* word;
  std::memcpy(&word, reinterpret_cast<char*>(object) + offset - (Corrupted(assumption) ? sizeof word : 0), sizeof word);
  return word;
}

bool CheckOrderedDict() {
  const OwnedRef dict = OwnedRef::Steal(PyODict_New());
  const OwnedRef first = Text("first"), second = Text("second");
  if (!dict || !first || !second) return false;
  const auto state = [&] { return WordAt(Assumption::kOrderedDict, dict.get(), kOrderedDictStateOffset); };
  const auto moves = [&](auto change) {
    PyObject* const before = state();
    return change() && state() != before;
  };
  const auto insert = [&](const OwnedRef& key) { return PyODict_SetItem(dict.get(), key.get(), Py_None) == 0; };
  if (!moves([&] { return insert(first); }) || !moves([&] { return insert(second); })) return false;
  if (!moves([&] {
        return static_cast<bool>(OwnedRef::Steal(PyObject_CallMethod(dict.get(), "move_to_end", "O", first.get())));
      })) {
    return false;
  }
  PyObject* const before = state();
  if (PyDict_GetItemWithError(dict.get(), first.get()) == nullptr || state() != before) return false;
  return OrderedDictState(dict.get()) == reinterpret_cast<size_t>(before) &&
         moves([&] { return PyODict_DelItem(dict.get(), second.get()) == 0; });
}

bool CheckDictKeys() {
  const OwnedRef texts = OwnedRef::Steal(PyDict_New()), numbers = OwnedRef::Steal(PyDict_New());
  const OwnedRef key = Text("key"), number = Number(1000003);
  if (!texts || !numbers || !key || !number || PyDict_SetItem(texts.get(), key.get(), Py_None) < 0 ||
      PyDict_SetItem(numbers.get(), number.get(), Py_None) < 0) {
    return false;
  }
  const auto* text_dict = reinterpret_cast<PyDictObject*>(texts.get());
  const auto* number_dict = reinterpret_cast<PyDictObject*>(numbers.get());
  return HasOnlyStringKeys(text_dict) != Corrupted(Assumption::kDictKeys) && !HasOnlyStringKeys(number_dict);
}

// A dict that was made for an object's values gets a table of its own, with the same content.
bool CheckDictValues(PyObject* plain) {
  const OwnedRef object = Instance(plain), number = Number(1000003);
  if (!object || !number || PyObject_SetAttrString(object.get(), "x", number.get()) < 0) return false;
  const OwnedRef dict = OwnedRef::Steal(PyObject_GenericGetDict(object.get(), nullptr));
  if (!dict || !PyDict_Check(dict.get())) return false;
  auto* attributes = reinterpret_cast<PyDictObject*>(dict.get());
  return (attributes->ma_values != nullptr) != Corrupted(Assumption::kDictValues) && HasTableOfItsOwn(attributes) &&
         attributes->ma_values == nullptr && PyDict_GET_SIZE(dict.get()) == 1 &&
         PyDict_GetItemString(dict.get(), "x") == number.get();
}

bool CheckInstanceAttributes(PyObject* plain, PyObject* function) {
  const OwnedRef values = Instance(plain), dict = Instance(plain);
  if (!values || !dict || InstanceDict(dict.get()) == nullptr) return false;
  for (PyObject* object : {values.get(), dict.get(), function}) {
    const bool before = HasInstanceAttributes(object);
    if (PyObject_SetAttrString(object, "x", Py_None) < 0) return false;
    const bool with = HasInstanceAttributes(object);
    if (PyObject_DelAttrString(object, "x") < 0) return false;
    if (!Holds(Assumption::kInstanceAttributes, !before && with && !HasInstanceAttributes(object))) return false;
  }
  return true;
}

// Objects of a fixed and of a variable size, and a builtin type's.
bool CheckDictPointers(PyObject* plain, PyObject* sized, PyObject* function) {
  const OwnedRef fixed = Instance(plain);
  const OwnedRef variable = OwnedRef::Steal(PyObject_CallFunction(sized, "((iii))", 1, 2, 3));
  if (!fixed || !variable) return false;
  for (PyObject* object : {fixed.get(), variable.get(), function}) {
    if (PyObject_SetAttrString(object, "x", Py_None) < 0) return false;
    auto* const dict = reinterpret_cast<PyObject*>(InstanceDict(object));
    const Py_ssize_t offset = DictPointerOffset(Py_TYPE(object), object);
    if (dict == nullptr || offset == 0) return false;
    PyObject* found;
    const Py_ssize_t shift = Corrupted(Assumption::kDictPointer) ? static_cast<Py_ssize_t>(sizeof found) : 0;
    std::memcpy(&found, reinterpret_cast<char*>(object) + offset + shift, sizeof found);
    if (found != dict) return false;
  }
  return DictPointerOffset(&PyLong_Type, Py_True) == 0;
}

bool CheckTypes(PyObject* box) {
  const OwnedRef name = Attribute(box, "__name__"), qualified = Attribute(box, "__qualname__");
  return name && qualified && WordAt(Assumption::kTypeNames, box, offsetof(PyHeapTypeObject, ht_name)) == name.get() &&
         WordAt(Assumption::kTypeNames, box, offsetof(PyHeapTypeObject, ht_qualname)) == qualified.get();
}

bool CheckTypeNamespaces(PyObject* box, PyObject* derived) {
  PyObject* own = TypeNamespace(AsType(box));
  PyObject* builtin = TypeNamespace(&PyLong_Type);
  PyObject* inherits = TypeNamespace(AsType(derived));
  return own != nullptr && builtin != nullptr && inherits != nullptr && PyDict_Check(own) && PyDict_Check(builtin) &&
         PyDict_GetItemString(own, "twice") != nullptr && PyDict_GetItemString(builtin, "__add__") != nullptr &&
         PyDict_GetItemString(inherits, "twice") == nullptr;
}

bool CheckSuper(PyObject* box, PyObject* derived) {
  const OwnedRef number = Number(1);
  const OwnedRef object = OwnedRef::Steal(number ? PyObject_CallOneArg(derived, number.get()) : nullptr);
  const OwnedRef super =
      object
          ? OwnedRef::Steal(PyObject_CallFunction(reinterpret_cast<PyObject*>(&PySuper_Type), "OO", box, object.get()))
          : OwnedRef();
  constexpr Assumption kThis = Assumption::kSuper;
  return super && WordAt(kThis, super.get(), offsetof(SuperObject, type)) == box &&
         WordAt(kThis, super.get(), offsetof(SuperObject, object)) == object.get() &&
         WordAt(kThis, super.get(), offsetof(SuperObject, object_type)) == derived;
}

bool CheckSlotWrapper() {
  const OwnedRef number = Number(1000003);
  const OwnedRef bound = number ? Attribute(number.get(), "__add__") : OwnedRef();
  PyObject* descriptor = PyDict_GetItemString(TypeNamespace(&PyLong_Type), "__add__");
  constexpr Assumption kThis = Assumption::kSlotWrapper;
  return bound && descriptor != nullptr &&
         WordAt(kThis, bound.get(), offsetof(BoundSlotWrapper, descriptor)) == descriptor &&
         WordAt(kThis, bound.get(), offsetof(BoundSlotWrapper, self)) == number.get();
}

bool CheckDictViews() {
  const OwnedRef plain = OwnedRef::Steal(PyDict_New()), ordered = OwnedRef::Steal(PyODict_New());
  if (!plain || !ordered) return false;
  for (PyObject* dict : {plain.get(), ordered.get()}) {
    for (const char* method : {"keys", "values", "items"}) {
      const OwnedRef view = OwnedRef::Steal(PyObject_CallMethod(dict, method, nullptr));
      if (!view || WordAt(Assumption::kDictView, view.get(), offsetof(DictView, dict)) != dict) return false;
    }
  }
  return true;
}

bool CheckMappingProxy() {
  const OwnedRef dict = OwnedRef::Steal(PyDict_New());
  const OwnedRef proxy = OwnedRef::Steal(dict ? PyDictProxy_New(dict.get()) : nullptr);
  return proxy && WordAt(Assumption::kMappingProxy, proxy.get(), offsetof(MappingProxy, mapping)) == dict.get();
}

bool CheckFunction(PyObject* function) {
  struct Field {
    const char* name;
    size_t offset;
  };
  constexpr Field kFields[] = {{"__code__", offsetof(PyFunctionObject, func_code)},
                               {"__name__", offsetof(PyFunctionObject, func_name)},
                               {"__defaults__", offsetof(PyFunctionObject, func_defaults)},
                               {"__globals__", offsetof(PyFunctionObject, func_globals)},
                               {"__kwdefaults__", offsetof(PyFunctionObject, func_kwdefaults)},
                               {"__closure__", offsetof(PyFunctionObject, func_closure)},
                               {"__qualname__", offsetof(PyFunctionObject, func_qualname)},
                               {"__annotations__", offsetof(PyFunctionObject, func_annotations)}};
  for (const Field& field : kFields) {
    const OwnedRef value = Attribute(function, field.name);
    if (!value || value.get() == Py_None) return false;
    if (WordAt(Assumption::kFunctionFields, function, field.offset) != value.get()) return false;
  }
  return true;
}

bool CheckDescriptors(PyObject* slotted, PyObject* box) {
  PyObject* const slot = PyDict_GetItemString(TypeNamespace(AsType(slotted)), "a");
  PyObject* const getter = PyDict_GetItemString(TypeNamespace(&PyProperty_Type), "fget");
  PyObject* const twice = PyDict_GetItemString(TypeNamespace(AsType(box)), "twice");
  PyObject* const code = PyDict_GetItemString(TypeNamespace(&PyFunction_Type), "__code__");
  PyObject* const append = PyDict_GetItemString(TypeNamespace(&PyList_Type), "append");
  PyObject* const add = PyDict_GetItemString(TypeNamespace(&PyLong_Type), "__add__");
  const OwnedRef list = OwnedRef::Steal(PyList_New(0));
  const OwnedRef bound = list ? Attribute(list.get(), "append") : OwnedRef();
  const OwnedRef object = Instance(slotted), number = Number(1000003);
  if (slot == nullptr || Py_TYPE(slot) != &PyMemberDescr_Type || getter == nullptr || twice == nullptr ||
      Py_TYPE(getter) != &PyMemberDescr_Type || code == nullptr || Py_TYPE(code) != &PyGetSetDescr_Type ||
      append == nullptr || Py_TYPE(append) != &PyMethodDescr_Type || add == nullptr ||
      Py_TYPE(add) != &PyWrapperDescr_Type || !object || !number || !bound || !PyCFunction_CheckExact(bound.get())) {
    return false;
  }
  constexpr Assumption kThis = Assumption::kDescriptors;
  const PyMemberDef* member = reinterpret_cast<PyMemberDescrObject*>(slot)->d_member;
  if (PyObject_SetAttrString(object.get(), "a", number.get()) < 0 || member->type != T_OBJECT_EX ||
      WordAt(kThis, object.get(), static_cast<size_t>(member->offset)) != number.get()) {
    return false;
  }
  const OwnedRef function = Attribute(twice, "fget");
  member = reinterpret_cast<PyMemberDescrObject*>(getter)->d_member;
  if (!function || WordAt(kThis, twice, static_cast<size_t>(member->offset)) != function.get()) return false;
  const auto is = [](const char* name, std::string_view expected) { return name != nullptr && name == expected; };
  return is(reinterpret_cast<PyGetSetDescrObject*>(code)->d_getset->name, "__code__") &&
         is(reinterpret_cast<PyMethodDescrObject*>(append)->d_method->ml_name, "append") &&
         reinterpret_cast<PyWrapperDescrObject*>(add)->d_wrapped ==
             reinterpret_cast<void*>(PyLong_Type.tp_as_number->nb_add) &&
         PyDescr_TYPE(add) == &PyLong_Type &&
         is(reinterpret_cast<PyCFunctionObject*>(bound.get())->m_ml->ml_name, "append");
}

bool CheckBuiltinObjects(PyObject* closure, PyObject* box) {
  const OwnedRef first = Number(1000003), second = Number(1000033), third = Number(1000037);
  const OwnedRef list = OwnedRef::Steal(PyList_New(0));
  const OwnedRef slice = OwnedRef::Steal(PySlice_New(first.get(), second.get(), third.get()));
  const OwnedRef method = OwnedRef::Steal(PyMethod_New(closure, first.get()));
  const OwnedRef reference = OwnedRef::Steal(PyWeakref_NewRef(box, nullptr));
  const OwnedRef cell = OwnedRef::Steal(PyCell_New(second.get()));
  if (!list || !slice || !method || !reference || !cell || PyList_Append(list.get(), first.get()) < 0 ||
      PyList_Append(list.get(), second.get()) < 0) {
    return false;
  }
  constexpr Assumption kThis = Assumption::kBuiltinObjects;
  PyObject** items = reinterpret_cast<PyListObject*>(list.get())->ob_item;
  const auto* limits = reinterpret_cast<PySliceObject*>(slice.get());
  return WordAt(kThis, cell.get(), offsetof(PyCellObject, ob_ref)) == second.get() && items[0] == first.get() &&
         items[1] == second.get() && PyList_GET_SIZE(list.get()) == 2 && limits->start == first.get() &&
         limits->stop == second.get() && limits->step == third.get() &&
         PyMethod_GET_FUNCTION(method.get()) == closure && PyMethod_GET_SELF(method.get()) == first.get() &&
         PyWeakref_GET_OBJECT(reference.get()) == box &&
         WordAt(kThis, cell.get(), offsetof(PyObject, ob_type)) == reinterpret_cast<PyObject*>(&PyCell_Type);
}

bool CheckLookups(PyObject* derived) {
  const OwnedRef key = Text("key"), name = Text("twice"), other = Text("other");
  const OwnedRef dict = OwnedRef::Steal(PyDict_New()), set = OwnedRef::Steal(PySet_New(nullptr));
  if (!key || !name || !other || !dict || !set || PyDict_SetItem(dict.get(), key.get(), Py_None) < 0 ||
      PySet_Add(set.get(), key.get()) < 0) {
    return false;
  }
  const Py_hash_t hash = PyObject_Hash(key.get());
  Py_ssize_t position = 0;
  PyObject* entry = nullptr;
  Py_hash_t entry_hash = 0;
  return _PyDict_GetItem_KnownHash(dict.get(), key.get(), hash) == Py_None &&
         _PyDict_GetItem_KnownHash(dict.get(), other.get(), PyObject_Hash(other.get())) == nullptr &&
         PyErr_Occurred() == nullptr && _PySet_NextEntry(set.get(), &position, &entry, &entry_hash) == 1 &&
         entry == key.get() && entry_hash == hash && _PySet_NextEntry(set.get(), &position, &entry, &entry_hash) == 0 &&
         _PyType_Lookup(AsType(derived), name.get()) != nullptr &&
         _PyType_Lookup(AsType(derived), other.get()) == nullptr;
}

// What is in a set is found as the set itself finds it, with keys that collide and places of others that are gone.
bool CheckMembership() {
  constexpr long kStep = 1L << 20;
  const OwnedRef set = OwnedRef::Steal(PySet_New(nullptr));
  if (!set) return false;
  const auto key_of = [](long i) { return Number(i % 3 == 0 ? i : i * kStep); };
  for (long i = 0; i < 120; ++i) {
    const OwnedRef key = key_of(i);
    if (!key || PySet_Add(set.get(), key.get()) < 0) return false;
    if (i % 5 == 4 && PySet_Discard(set.get(), key_of(i - 3).get()) < 0) return false;
    for (long k = 0; k < 150; k += i % 7 == 0 ? 1 : 13) {
      const OwnedRef other = key_of(k);
      if (!other) return false;
      const Membership found = FindInSet(set.get(), other.get(), PyObject_Hash(other.get()));
      const int expected = PySet_Contains(set.get(), other.get());
      if (expected < 0 || found != (expected == 1 ? Membership::kPresent : Membership::kAbsent)) return false;
    }
  }
  const OwnedRef one = Number(1), equal = OwnedRef::Steal(PyFloat_FromDouble(1.0));
  const OwnedRef ones = OwnedRef::Steal(PySet_New(nullptr));
  return one && equal && ones && PySet_Add(ones.get(), equal.get()) == 0 &&
         FindInSet(ones.get(), one.get(), PyObject_Hash(one.get())) == Membership::kUnknown;
}

bool CheckErrorIndicator(PyThreadState* thread) {
  if (compat::HasError(thread)) return false;
  PyErr_SetNone(PyExc_KeyError);
  const bool seen = compat::HasError(thread);
  PyErr_Clear();
  return seen && !compat::HasError(thread);
}

bool CheckStackChunk(const PyThreadState* thread) {
  const _PyStackChunk* chunk = thread->datastack_chunk;
  if (chunk == nullptr) return thread->datastack_top == thread->datastack_limit;  // no Python frame yet
  const auto* end = reinterpret_cast<const char*>(chunk) + chunk->size;
  return reinterpret_cast<const char*>(thread->datastack_limit) == end && thread->datastack_top >= &chunk->data[0] &&
         thread->datastack_top <= thread->datastack_limit;
}

// No trace function is installed for this: that raises audit events, which a program may listen to. What the thread's
// fields hold is told by sys.gettrace() and sys.getprofile(); nothing runs while they hold something else.
bool CheckTraceFunctions(PyThreadState* thread) {
  const OwnedRef marker = Text("cuvil_self_test");
  if (!marker) return false;
  struct Slot {
    const char* reader;
    PyObject** object;
  };
  for (const Slot& slot : {Slot{"gettrace", &thread->c_traceobj}, Slot{"getprofile", &thread->c_profileobj}}) {
    PyObject* reader = PySys_GetObject(slot.reader);
    if (reader == nullptr || !PyCFunction_CheckExact(reader)) continue;  // replaced by the program
    PyObject* const before = *slot.object;
    *slot.object = marker.get();
    const OwnedRef read = OwnedRef::Steal(PyObject_CallNoArgs(reader));
    *slot.object = before;
    if (read.get() != marker.get()) return false;
  }
  // The functions stand before their objects.
  static_assert(offsetof(PyThreadState, c_tracefunc) == offsetof(PyThreadState, c_profilefunc) + sizeof(void*));
  static_assert(offsetof(PyThreadState, c_profileobj) == offsetof(PyThreadState, c_tracefunc) + sizeof(void*));
  return (thread->c_traceobj == nullptr || thread->c_tracefunc != nullptr) &&
         (thread->c_profileobj == nullptr || thread->c_profilefunc != nullptr);
}

#if CUVIL_PY311
int Unreached(PyObject*, PyFrameObject*, int, PyObject*) { return 0; }

// Leaving the tracing scope makes the interpreter look at the thread's functions and tell by the flag.
bool CheckTracingState(PyThreadState* thread) {
  for (Py_tracefunc* function : {&thread->c_tracefunc, &thread->c_profilefunc}) {
    Py_tracefunc const before = *function;
    *function = Unreached;
    PyThreadState_LeaveTracing(thread);
    const bool seen = thread->cframe->use_tracing != 0 && ThreadIsObserved(thread);
    PyThreadState_EnterTracing(thread);
    *function = before;
    if (!seen) return false;
  }
  if (thread->c_tracefunc != nullptr || thread->c_profilefunc != nullptr) return true;
  PyThreadState_LeaveTracing(thread);
  const bool quiet = !ThreadIsObserved(thread);
  PyThreadState_EnterTracing(thread);
  return quiet;
}
#else
// A free tool id is taken for a moment: its name shows where names are, and sys.monitoring.get_events() where events
// are. No event is asked for, so no code is instrumented.
bool CheckTracingState(PyThreadState* thread) {
  PyInterpreterState* interpreter = thread->interp;
  PyObject* monitoring = PySys_GetObject("monitoring");
  const OwnedRef name = Text("cuvil_self_test");
  if (monitoring == nullptr || !name) return false;
  const OwnedRef get_tool = Attribute(monitoring, "get_tool"), use_tool = Attribute(monitoring, "use_tool_id");
  const OwnedRef get_events = Attribute(monitoring, "get_events"), free_tool = Attribute(monitoring, "free_tool_id");
  for (const OwnedRef* function : {&get_tool, &use_tool, &get_events, &free_tool}) {
    if (!*function) return false;
    if (!PyCFunction_CheckExact(function->get())) return true;  // replaced by the program
  }
  constexpr int kNumTools = 6;  // for programs; the other two are settrace's and setprofile's
  for (int tool = 0; tool < kNumTools; ++tool) {
    const OwnedRef user = OwnedRef::Steal(PyObject_CallFunction(get_tool.get(), "i", tool));
    if (!user) return false;
    if (user.get() != Py_None) {
      if (!ThreadIsObserved(thread)) return false;
      continue;
    }
    if (!OwnedRef::Steal(PyObject_CallFunction(use_tool.get(), "iO", tool, name.get()))) return false;
    bool found = interpreter->monitoring_tool_names[tool] == name.get() && ThreadIsObserved(thread);
    if (found) {
      uint8_t& tools = interpreter->monitors.tools[PY_MONITORING_EVENT_PY_START];
      const uint8_t before = tools;
      tools = static_cast<uint8_t>(before | (1u << tool));
      const OwnedRef events = OwnedRef::Steal(PyObject_CallFunction(get_events.get(), "i", tool));
      tools = before;
      found = events && PyLong_AsLong(events.get()) == 1L << PY_MONITORING_EVENT_PY_START;
    }
    return static_cast<bool>(OwnedRef::Steal(PyObject_CallFunction(free_tool.get(), "i", tool))) && found;
  }
  return true;
}
#endif

}  // namespace

absl::Status CheckLayouts(PyObject* globals, PyThreadState* thread) {
  const auto get = [&](const char* name) { return PyDict_GetItemString(globals, name); };
  PyObject* const box = get("Box");
  PyObject* const derived = get("Derived");
  PyObject* const plain = get("Plain");
  PyObject* const sized = get("Sized");
  PyObject* const slotted = get("Slotted");
  PyObject* const straight = get("straight");
  PyObject* const closure = get("closure");
  for (PyObject* object : {box, derived, plain, sized, slotted, straight, closure}) {
    if (object == nullptr) return Violated(Assumption::kTestProgram);
  }
  // The checks that look in another place when they are corrupted come first in each pair; the others are turned round.
  const auto check = [&](Assumption assumption, bool found) {
    PyErr_Clear();
    return found ? absl::OkStatus() : Violated(assumption);
  };
  const auto expect = [&](Assumption assumption, bool found) { return check(assumption, Holds(assumption, found)); };
  absl::Status status = check(Assumption::kOrderedDict, CheckOrderedDict());
  if (status.ok()) status = check(Assumption::kDictKeys, CheckDictKeys());
  if (status.ok()) status = check(Assumption::kDictValues, CheckDictValues(plain));
  if (status.ok()) status = check(Assumption::kInstanceAttributes, CheckInstanceAttributes(plain, straight));
  if (status.ok()) status = check(Assumption::kDictPointer, CheckDictPointers(plain, sized, straight));
  if (status.ok()) status = check(Assumption::kTypeNames, CheckTypes(box));
  if (status.ok()) status = expect(Assumption::kTypeNamespace, CheckTypeNamespaces(box, derived));
  if (status.ok()) status = check(Assumption::kSuper, CheckSuper(box, derived));
  if (status.ok()) status = check(Assumption::kSlotWrapper, CheckSlotWrapper());
  if (status.ok()) status = check(Assumption::kDictView, CheckDictViews());
  if (status.ok()) status = check(Assumption::kMappingProxy, CheckMappingProxy());
  if (status.ok()) status = check(Assumption::kFunctionFields, CheckFunction(closure));
  if (status.ok()) status = check(Assumption::kDescriptors, CheckDescriptors(slotted, box));
  if (status.ok()) status = check(Assumption::kBuiltinObjects, CheckBuiltinObjects(closure, box));
  if (status.ok()) status = expect(Assumption::kLookups, CheckLookups(derived));
  if (status.ok()) status = expect(Assumption::kMembership, CheckMembership());
  if (status.ok()) status = expect(Assumption::kErrorIndicator, CheckErrorIndicator(thread));
  if (status.ok()) status = expect(Assumption::kStackChunk, CheckStackChunk(thread));
  if (status.ok()) status = expect(Assumption::kTraceFunctions, CheckTraceFunctions(thread));
  if (status.ok()) status = expect(Assumption::kTracingState, CheckTracingState(thread));
  return status;
}

}  // namespace cuvil::agent
