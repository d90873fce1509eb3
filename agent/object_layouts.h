// Layouts of builtin objects that CPython keeps to itself, the same in 3.11–3.13. layout_self_test.cc checks each of
// them on a throw-away object before anything relies on it.
//
// Threads:   GIL held.
// Ownership: everything is borrowed.
#pragma once

#include <Python.h>

#include <cstddef>

namespace cuvil::agent {

// super(). Source: Objects/typeobject.c, superobject.
struct SuperObject {
  PyObject_HEAD PyTypeObject* type;
  PyObject* object;
  PyTypeObject* object_type;
};

// A slot's method that was read from an object, (1).__add__. Source: Objects/descrobject.c, wrapperobject.
struct BoundSlotWrapper {
  PyObject_HEAD PyWrapperDescrObject* descriptor;
  PyObject* self;
};

// keys(), values() and items(). Source: Include/internal/pycore_dict.h, _PyDictViewObject.
struct DictView {
  PyObject_HEAD PyObject* dict;
};

inline bool IsDictView(PyTypeObject* type) {
  return type == &PyDictItems_Type || type == &PyDictKeys_Type || type == &PyDictValues_Type ||
         type == &PyODictItems_Type || type == &PyODictKeys_Type || type == &PyODictValues_Type;
}

// types.MappingProxyType. Source: Objects/descrobject.c, mappingproxyobject.
struct MappingProxy {
  PyObject_HEAD PyObject* mapping;
};

// An OrderedDict's od_state: behind the dict, od_first, od_last, od_fast_nodes, od_fast_nodes_size and
// od_resize_sentinel. Source: Objects/odictobject.c, struct _odictobject.
inline constexpr size_t kOrderedDictStateOffset = sizeof(PyDictObject) + 5 * sizeof(void*);

// The byte of a dict's table that says what its keys are; 0 is the general kind. Before it stand the reference count,
// log2 of the table's size and log2 of its index's bytes. Source: Include/internal/pycore_dict.h, _dictkeysobject.
inline constexpr size_t kDictKeysKindOffset = 10;
static_assert(sizeof(Py_ssize_t) == 8);

}  // namespace cuvil::agent
