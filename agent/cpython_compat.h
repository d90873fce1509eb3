// One face for CPython 3.11, 3.12 and 3.13: frames, instructions, calls, tags. The files cpython_compat* are the only
// ones that know which version they are compiled for.
//
// Threads:   GIL held, unless a function says otherwise.
// Ownership: everything returned is borrowed.
// Errors:    no function here changes the error indicator, except InstanceDict (see there).
// Source:    Include/internal/pycore_frame.h, Python/bytecodes.c (3.12, 3.13), Python/ceval.c (3.11).
#pragma once

#include <Python.h>

#include <bit>
#include <cstddef>
#include <cstdint>

#if PY_VERSION_HEX < 0x030B0000 || PY_VERSION_HEX >= 0x030E0000
#error "cuvil supports CPython 3.11, 3.12 and 3.13"
#endif
#ifdef Py_GIL_DISABLED
#error "cuvil does not support free-threaded CPython"
#endif

struct _PyInterpreterFrame;

namespace cuvil::agent {

// ---------------------------------------------------------------------------------------------------- instructions

// What an instruction does, whatever its number and name are in the running version.
enum class Op : uint8_t {
  kUnknown,         // not an instruction that the compiler emits
  kPure,            // moves values between stack, locals and constants, or jumps without a test
  kLoadGlobal,      // NameOperand
  kLoadName,        // NameOperand; locals mapping, then globals, then builtins
  kLoadAttr,        // NameOperand; object is TOS
  kLoadMethod,      // kLoadAttr that may push (function, self) for the call that follows
  kLoadSuperAttr,   // NameOperand; stack: super, class, self (3.12+)
  kLoadDeref,       // DerefIndex
  kLoadClassDeref,  // DerefIndex; class namespace first (3.12+: TOS is that namespace)
  kLoadFromDict,    // NameOperand; TOS namespace, then globals and builtins (3.12+)
  kLoadBuildClass,  // builtins.__build_class__
  kLoadLocals,      // pushes the locals mapping
  kLoadAssertionError,
  kStoreAttr,     // NameOperand; stack: value, object
  kDeleteAttr,    // NameOperand
  kStoreGlobal,   // NameOperand
  kDeleteGlobal,  // NameOperand
  kStoreName,     // NameOperand
  kDeleteName,    // NameOperand
  kStoreDeref,    // DerefIndex
  kDeleteDeref,   // DerefIndex
  kBinaryOp,      // BinaryOpKind; stack: left, right
  kBinarySubscr,  // stack: container, key
  kStoreSubscr,   // stack: value, container, key
  kDeleteSubscr,  // stack: container, key
  kBinarySlice,   // stack: container, start, stop
  kStoreSlice,    // stack: value, container, start, stop
  kCompareOp,     // CompareKind; CompareCoercesToBool
  kContainsOp,    // stack: value, container; Inverted
  kIsOp,          // Inverted
  kUnaryNot,      // tests the truth of TOS
  kUnaryNegative,
  kUnaryPositive,
  kUnaryInvert,
  kToBool,       // tests the truth of TOS (3.13)
  kBranchTruth,  // tests the truth of TOS and jumps: BranchSense, BranchKeepsValue
  kBranchNone,   // jumps if TOS is (not) None: BranchSense
  kGetIter,
  kForIter,  // TOS is the iterator; jumps to Site::target when it is exhausted
  kGetLen,
  kUnpackSequence,  // oparg values
  kUnpackEx,        // oparg & 255 values, the starred one, oparg >> 8 values
  kCall,            // DecodeCall
  kCallEx,          // DecodeCallEx
  kBuild,           // tuple, list, set, map, slice or string from stack values; see BuildKind
  kBuildString,     // concatenates oparg strings
  kListExtend,      // TOS iterable into the list at stack_top[-1 - oparg]
  kListToTuple,
  kSetUpdate,  // same layout as kListExtend, as are the next four
  kDictUpdate,
  kDictMerge,
  kListAppend,
  kSetAdd,
  kMapAdd,  // stack: key, value; the dict is at stack_top[-2 - oparg]
  kMakeFunction,
  kSetFunctionAttribute,
  kImportName,  // NameOperand
  kImportFrom,  // NameOperand
  kImportStar,
  kWithEnter,  // TOS is the context manager
  kWithExit,   // calls __exit__ with the exception: it is at stack_top[-4]
  kAsyncWithEnter,
  kGetAiter,
  kGetAnext,
  kEndAsyncFor,
  kGetAwaitable,
  kAsyncGenWrap,
  kRaise,
  kReraise,
  kPushExcInfo,
  kPopExcept,
  kCheckExcMatch,
  kCheckEgMatch,
  kMatchSequence,
  kMatchMapping,
  kMatchClass,
  kMatchKeys,
  kFormatValue,  // 3.11, 3.12: oparg & 3 conversion, oparg & 4 format spec on TOS
  kFormatSimple,
  kFormatWithSpec,
  kConvertValue,
  kReturn,
  kYield,
  kSend,
  kGetYieldFromIter,
  kReturnGenerator,
  kSetupAnnotations,
  kIntrinsic1,  // oparg: Include/internal/pycore_intrinsics.h
  kIntrinsic2,
  kPrintExpr,
};

Op Classify(int opcode, int oparg) noexcept;
const char* OpName(Op op) noexcept;

// One instruction of the original code, as a probe announces it. Instructions without a probe of their own (RESUME,
// SEND, END_FOR, ...: docs/design/0004-injection.md) are never announced, but `target` and `next` may name them.
struct Site {
  int opcode;   // number in the running version, neither specialised nor instrumented
  int oparg;    // EXTENDED_ARG included
  int depth;    // values on the operand stack before the instruction
  int offset;   // bytes, in the original code; of the instruction itself, not of its EXTENDED_ARG
  int target;   // offset of the site that a taken jump leads to; -1 if the instruction cannot jump
  int next;     // offset of the site that follows; past the end of the code for the last one
  int kwnames;  // index in co_consts of the keyword names that a call uses (3.11, 3.12); -1 if none
  Op op;
};

class FrameView;

// Attribute, global, method or module name of an instruction that has one, else null.
PyObject* NameOperand(const FrameView& frame, const Site& site) noexcept;
// For a kBuild: every how many of its operands one is a key, from the first on; 0 if it makes neither a set nor a dict.
int KeyStride(const Site& site) noexcept;
// Index in localsplus() of the cell that a kLoadDeref, kStoreDeref, kDeleteDeref or kLoadClassDeref uses.
int DerefIndex(const Site& site) noexcept;
int BinaryOpKind(const Site& site) noexcept;           // NB_ADD ...; the same numbers in all versions
int CompareKind(const Site& site) noexcept;            // Py_LT ... Py_GE
bool CompareCoercesToBool(const Site& site) noexcept;  // the comparison's result is tested for truth at once (3.13)
bool Inverted(const Site& site) noexcept;              // `not in`, `is not`
// The value of the test (truth, or being None) that makes a kBranchTruth or kBranchNone jump.
bool BranchSense(const Site& site) noexcept;
// 3.11's `and`, `or`: the value stays on the stack when the jump is taken.
bool BranchKeepsValue(const Site& site) noexcept;
// A kLoadSuperAttr that may push (function, self) for the call that follows.
bool SuperIsMethod(const Site& site) noexcept;

enum class BuildKind : uint8_t { kTuple, kList, kSet, kMap, kConstKeyMap, kSlice };
BuildKind GetBuildKind(const Site& site) noexcept;

// ----------------------------------------------------------------------------------------------------------- frames

enum class FrameOwner : uint8_t { kThread, kGenerator };

// Borrowed read-only look at one Python frame; valid until the callback that received it returns.
//
// A call of a generator or coroutine function is a frame of its own (creates_generator()) that ends at once and returns
// the generator; the body is another frame, which lives in the generator and is entered anew at every resume.
class FrameView {
 public:
  FrameView() = default;
  FrameView(_PyInterpreterFrame* frame, PyCodeObject* code, FrameOwner owner)
      : frame_(frame), code_(code), owner_(owner) {}

  explicit operator bool() const { return frame_ != nullptr; }
  // Identity, stable as long as the frame (for a generator's body: the generator) lives, and reused afterwards.
  void* id() const { return frame_; }
  // The code that the user wrote, whether or not the frame runs a copy of it.
  PyCodeObject* code() const { return code_; }
  PyFunctionObject* function() const noexcept;
  PyObject* globals() const noexcept;
  PyObject* builtins() const noexcept;
  PyObject* locals() const noexcept;       // namespace of a module, class body or exec; null in functions
  PyObject** localsplus() const noexcept;  // locals, cells, free variables: co_nlocalsplus of them
  FrameView previous() const noexcept;     // the calling Python frame, shim frames left out
  int line() const noexcept;               // of the instruction that it is at; 0 if that has none
  PyObject* generator() const noexcept;    // generator, coroutine or async generator that owns the frame, or null
  // Entered at a yield, or at a generator's first start.
  bool resumed() const { return owner_ == FrameOwner::kGenerator; }
  // See above; true for the call's own frame only.
  bool creates_generator() const {
    return owner_ == FrameOwner::kThread &&
           (code_->co_flags & (CO_GENERATOR | CO_COROUTINE | CO_ASYNC_GENERATOR | CO_ITERABLE_COROUTINE)) != 0;
  }

 private:
  _PyInterpreterFrame* frame_ = nullptr;
  PyCodeObject* code_ = nullptr;
  FrameOwner owner_ = FrameOwner::kThread;  // kept here because a frame that ended cannot be asked
};

// The innermost Python frame of the thread, or an empty view.
FrameView CurrentFrame(PyThreadState* thread) noexcept;

// Line of the instruction at `offset` of `code`; 0 if it has none.
int ExactSourceLine(PyCodeObject* code, int offset) noexcept;
// Its column, from 1 and in bytes; 0 if it has none, or if the code was compiled without columns.
int ExactSourceColumn(PyCodeObject* code, int offset) noexcept;

// ------------------------------------------------------------------------------------------------------------ calls

// What a kCall is about to call. `args` holds nargs values: positional ones, then one for each name in `kwnames`.
// A method that was loaded for the call has its self in `self_or_null`; a bound method object that was not taken apart
// is `callable` itself.
struct CallSiteView {
  PyObject* callable;
  PyObject* self_or_null;
  PyObject* const* args;
  Py_ssize_t nargs;
  PyObject* kwnames;  // tuple or null
};

// `positional` may be any iterable; `keywords` is a dict or null.
struct CallExView {
  PyObject* callable;
  PyObject* positional;
  PyObject* keywords;
};

// Precondition: site.op is kCall (kCallEx) and stack_top is what the probe was given. False: not such a site.
bool DecodeCall(const FrameView& frame, const Site& site, PyObject** stack_top, CallSiteView* call) noexcept;
bool DecodeCallEx(const FrameView& frame, const Site& site, PyObject** stack_top, CallExView* call) noexcept;

// ------------------------------------------------------------------------------------------------------------- tags

// 3.12 and 3.13 keep watcher bits (and 3.13 a mutation counter) below the version.
#if PY_VERSION_HEX >= 0x030D0000
inline constexpr int kDictTagShift = 12;
#elif PY_VERSION_HEX >= 0x030C0000
inline constexpr int kDictTagShift = 8;
#else
inline constexpr int kDictTagShift = 0;
#endif

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
// Moves whenever a key is added, removed or bound to another object; unique among all dicts of the process.
// Not noticed: see docs/design/0008-guards.md.
inline uint64_t DictTag(const PyDictObject* dict) noexcept { return dict->ma_version_tag >> kDictTagShift; }
inline constexpr int16_t kDictTagOffset = offsetof(PyDictObject, ma_version_tag);
#pragma GCC diagnostic pop

// The tag as it stands: 0 when the type changed since a tag was assigned. One load, for polling.
inline uint32_t CurrentTypeTag(const PyTypeObject* type) noexcept { return type->tp_version_tag; }
// The same in the upper half of a word: nothing but tp_del's bytes lie below.
inline constexpr int kTypeTagShift = 32;
inline constexpr int16_t kTypeTagOffset = offsetof(PyTypeObject, tp_version_tag) - 4;
static_assert(sizeof(PyTypeObject::tp_version_tag) == 4 && sizeof(void*) == 8);
static_assert(std::endian::native == std::endian::little);
// Assigns a tag if the type has none; 0: the interpreter gives this type none any more, so it cannot be guarded.
uint32_t TypeTag(PyTypeObject* type) noexcept;

// The object has attributes of its own in a __dict__. Makes no dict; no Python code runs.
bool HasInstanceAttributes(PyObject* object) noexcept;

// The type's own namespace, without its bases'; on 3.12+ builtin types keep it outside of tp_dict. Borrowed.
PyObject* TypeNamespace(PyTypeObject* type) noexcept;

// The object's __dict__, materialised and detached from the object's inline values, so that every later attribute
// store moves its tag (python/cpython#125608: on 3.13.0 a store through inline values moves none). Null: the type has
// no __dict__, or it could not be made (an exception raised on the way is cleared).
PyDictObject* InstanceDict(PyObject* object) noexcept;
// True for a dict whose values are its own, so that every change of them moves its tag. A dict that shares them with
// the object whose attributes they are (3.13 moves no tag when the object stores one) gets a table of its own first.
bool HasTableOfItsOwn(PyDictObject* dict) noexcept;
// All keys are exactly str, so that no lookup runs Python code. False for a dict that has had others.
bool HasOnlyStringKeys(const PyDictObject* dict) noexcept;

// ---------------------------------------------------------------------------------------------------------- threads

// A trace function, profile function or sys.monitoring tool sees what this thread executes.
bool ThreadIsObserved(PyThreadState* thread) noexcept;

}  // namespace cuvil::agent
