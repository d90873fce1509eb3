// Functions that every CPython this module supports exports, and that no public header declares on all of them: 3.13
// moved them to internal ones.
//
// Threads: GIL held.
#pragma once

#include <Python.h>

extern "C" {
// The attribute as the type's method resolution order has it, borrowed; null without an exception. Runs no Python code.
PyAPI_FUNC(PyObject*) _PyType_Lookup(PyTypeObject*, PyObject*);
// Borrowed; null without an exception if the key is not there, with one if a comparison raised.
PyAPI_FUNC(PyObject*) _PyDict_GetItem_KnownHash(PyObject*, PyObject*, Py_hash_t);
// As PyDict_Next, of a set: 0 at its end; the key is borrowed.
PyAPI_FUNC(int) _PySet_NextEntry(PyObject*, Py_ssize_t*, PyObject**, Py_hash_t*);
}
