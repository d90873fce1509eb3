// CPython's internal structures, for the files that swap code in frames: cpython_compat*.cc, instrument.cc,
// frame_hook.cc, interpreter_self_test.cc and layout_self_test.cc. Everybody else includes cpython_compat.h.
//
// Threads:   GIL held.
// Source:    Include/internal of the version compiled for. The headers are C: they need extern "C", and some macros out
//            of the way (3.11, 3.12: pycore_atomic.h wants C11 atomics; 3.12: two names are macros and functions).
#pragma once

#include <Python.h>
#include <opcode.h>

#ifndef Py_BUILD_CORE
#error "name the including file in cuvil_uses_cpython_internals()"
#endif
#undef HAVE_STD_ATOMIC
#undef _PyGC_FINALIZED
#undef _PyObject_LookupSpecial
extern "C" {
#include <internal/pycore_code.h>
#include <internal/pycore_frame.h>
#include <internal/pycore_interp.h>
#include <internal/pycore_pystate.h>
}

#include <string>

#include "agent/cpython_compat.h"

#define CUVIL_PY311 (PY_VERSION_HEX < 0x030C0000)
#define CUVIL_PY312 (PY_VERSION_HEX >= 0x030C0000 && PY_VERSION_HEX < 0x030D0000)
#define CUVIL_PY313 (PY_VERSION_HEX >= 0x030D0000)

namespace cuvil::agent::compat {

// ---------------------------------------------------------------------------------------------------------- frames

inline _PyInterpreterFrame* TopFrame(PyThreadState* thread) {
#if CUVIL_PY313
  return thread->current_frame;
#else
  return thread->cframe->current_frame;
#endif
}

// Null for a frame that runs no code object: the interpreter's own shims.
inline PyCodeObject* FrameCode(const _PyInterpreterFrame* frame) {
#if CUVIL_PY313
  PyObject* executable = frame->f_executable;
  return PyCode_Check(executable) ? reinterpret_cast<PyCodeObject*>(executable) : nullptr;
#else
  return frame->f_code;
#endif
}

// The instruction that is being executed. In a frame that has not started: EntryPointer.
inline _Py_CODEUNIT*& InstructionPointer(_PyInterpreterFrame* frame) {
#if CUVIL_PY313
  return frame->instr_ptr;
#else
  return frame->prev_instr;
#endif
}

inline _Py_CODEUNIT* EntryPointer(PyCodeObject* code) {
#if CUVIL_PY313
  return _PyCode_CODE(code);
#else
  return _PyCode_CODE(code) - 1;
#endif
}

inline FrameOwner Owner(const _PyInterpreterFrame* frame) {
  return frame->owner == FRAME_OWNED_BY_GENERATOR ? FrameOwner::kGenerator : FrameOwner::kThread;
}

// Makes a frame that has not started run `code` from its beginning; drops the reference to what it had.
inline void SetFrameCode(_PyInterpreterFrame* frame, PyCodeObject* code) {
  Py_INCREF(code);
#if CUVIL_PY313
  PyObject* old = frame->f_executable;
  frame->f_executable = reinterpret_cast<PyObject*>(code);
#else
  PyCodeObject* old = frame->f_code;
  frame->f_code = code;
#endif
  InstructionPointer(frame) = EntryPointer(code);
  Py_DECREF(old);
}

// The generator, coroutine or async generator whose body the frame is. Precondition: Owner() is kGenerator.
inline PyGenObject* Generator(_PyInterpreterFrame* frame) {
  return reinterpret_cast<PyGenObject*>(reinterpret_cast<char*>(frame) - offsetof(PyGenObject, gi_iframe));
}

// After its frame ran: the generator waits at a yield (all such states lie below "executing").
inline bool IsSuspended(const PyGenObject* generator) { return generator->gi_frame_state < FRAME_EXECUTING; }

// Gives the topmost frame of the thread `growth` more stack entries than it was allocated with. False: no room.
inline bool GrowTopFrame(PyThreadState* thread, _PyInterpreterFrame* frame, PyCodeObject* code, int allocated_stack,
                         int growth) {
  PyObject** end = frame->localsplus + code->co_nlocalsplus + allocated_stack;
  if (end != thread->datastack_top || thread->datastack_limit - end <= growth) return false;
  thread->datastack_top += growth;
  return true;
}

inline bool HasError(const PyThreadState* thread) {
#if CUVIL_PY311
  return thread->curexc_type != nullptr;
#else
  return thread->current_exception != nullptr;
#endif
}

// A hooked frame costs C recursion that an inlined one does not, and 3.12's limit of 1,500 units then ends a recursion
// at depth 748 whatever sys.setrecursionlimit says. The evaluator takes two units for each entry; they are given back
// for its duration. The hook watches the real C stack instead.
class RecursionCredit {
 public:
#if CUVIL_PY311
  explicit RecursionCredit(PyThreadState*) {}
#else
  explicit RecursionCredit(PyThreadState* thread) : thread_(thread) { thread_->c_recursion_remaining += kUnits; }
  ~RecursionCredit() { thread_->c_recursion_remaining -= kUnits; }

 private:
  static constexpr int kUnits = 2;  // PY_EVAL_C_STACK_UNITS, Python/ceval_macros.h
  PyThreadState* thread_;
#endif
};

// ---------------------------------------------------------------------------------------------------------- opcodes

int CacheUnits(int opcode);
bool HasJump(int opcode);
bool IsBackwardJump(int opcode);
bool FallsThrough(int opcode);
// The top of the stack is an object, not null, whenever the instruction starts: a probe can compare it.
bool TopIsObject(int opcode);
// False where a probe would separate instructions that the interpreter, or generator methods, expect side by side.
bool ProbeAllowedBetween(int previous_opcode, int opcode);
// The instruction passes keyword names to the call that follows it directly (3.11, 3.12).
bool IsKwNames(int opcode);
// The part of a call that follows its argument check (3.11): a site of its own would come too late.
bool IsSecondHalfOfCall(int previous_opcode, int opcode);
// CALL must not be specialised in a copy: 3.13's CALL_ALLOC_AND_ENTER_INIT enters __init__ past the PEP 523 hook.
bool MustNotSpecialize(int opcode);
void ForbidSpecialization(_Py_CODEUNIT* instruction);

inline constexpr int kLoadConst = LOAD_CONST, kCopy = COPY, kDeleteSubscr = DELETE_SUBSCR, kExtendedArg = EXTENDED_ARG,
                     kCache = CACHE, kResume = RESUME, kReturnGenerator = RETURN_GENERATOR;

// ------------------------------------------------------------------------------------------------------------- code

struct CodeParts {
  PyObject* constants;  // tuple
  std::string bytecode, lines, exceptions;
  int stack_size;
};
// `original` with other parts. Null, without an exception: not possible.
PyCodeObject* NewCode(PyCodeObject* original, const CodeParts& parts);
// Frames and generators of `code` are allocated with `growth` more stack entries from now on.
void GrowStack(PyCodeObject* code, int growth);

Py_ssize_t RequestExtraIndex(freefunc release);
void* GetExtra(PyCodeObject* code, Py_ssize_t index);
bool SetExtra(PyCodeObject* code, Py_ssize_t index, void* extra);

// ------------------------------------------------------------------------------------------------------- functions

// Makes every call of the function go through `entry`, also from call sites that are specialised for the function.
void SetVectorcall(PyFunctionObject* function, vectorcallfunc entry);

}  // namespace cuvil::agent::compat
