// What the instructions of each version mean.

#include "agent/cpython_compat.h"
#include "agent/cpython_compat_internal.h"

extern "C" {
int CuvilOpcodeHasJump(int opcode);
int CuvilOpcodeCaches(int opcode);
}

namespace cuvil::agent {
namespace {

#if !CUVIL_PY311
// Include/internal/pycore_intrinsics.h
Op ClassifyIntrinsic1(int oparg) {
  switch (oparg) {
    case 1:
      return Op::kPrintExpr;
    case 2:
      return Op::kImportStar;
    case 4:
      return Op::kAsyncGenWrap;
    case 5:
      return Op::kUnaryPositive;
    case 6:
      return Op::kListToTuple;
    default:
      return Op::kIntrinsic1;
  }
}
#endif

}  // namespace

Op Classify(int opcode, int oparg) noexcept {
  static_cast<void>(oparg);  // some versions have no instruction whose kind depends on it
  switch (opcode) {
    case NOP:
    case POP_TOP:
    case PUSH_NULL:
    case COPY:
    case SWAP:
    case LOAD_CONST:
    case LOAD_FAST:
    case STORE_FAST:
    case DELETE_FAST:
    case MAKE_CELL:
    case COPY_FREE_VARS:
    case RESUME:
    case JUMP_FORWARD:
    case JUMP_BACKWARD:
    case JUMP_BACKWARD_NO_INTERRUPT:
      return Op::kPure;
    case UNARY_NEGATIVE:
      return Op::kUnaryNegative;
    case UNARY_NOT:
      return Op::kUnaryNot;
    case UNARY_INVERT:
      return Op::kUnaryInvert;
    case BINARY_SUBSCR:
      return Op::kBinarySubscr;
    case STORE_SUBSCR:
      return Op::kStoreSubscr;
    case DELETE_SUBSCR:
      return Op::kDeleteSubscr;
    case BINARY_OP:
      return Op::kBinaryOp;
    case COMPARE_OP:
      return Op::kCompareOp;
    case IS_OP:
      return Op::kIsOp;
    case CONTAINS_OP:
      return Op::kContainsOp;
    case GET_LEN:
      return Op::kGetLen;
    case MATCH_MAPPING:
      return Op::kMatchMapping;
    case MATCH_SEQUENCE:
      return Op::kMatchSequence;
    case MATCH_KEYS:
      return Op::kMatchKeys;
    case MATCH_CLASS:
      return Op::kMatchClass;
    case PUSH_EXC_INFO:
      return Op::kPushExcInfo;
    case POP_EXCEPT:
      return Op::kPopExcept;
    case CHECK_EXC_MATCH:
      return Op::kCheckExcMatch;
    case CHECK_EG_MATCH:
      return Op::kCheckEgMatch;
    case RAISE_VARARGS:
      return Op::kRaise;
    case RERAISE:
      return Op::kReraise;
    case WITH_EXCEPT_START:
      return Op::kWithExit;
    case BEFORE_WITH:
      return Op::kWithEnter;
    case BEFORE_ASYNC_WITH:
      return Op::kAsyncWithEnter;
    case GET_AITER:
      return Op::kGetAiter;
    case GET_ANEXT:
      return Op::kGetAnext;
    case END_ASYNC_FOR:
      return Op::kEndAsyncFor;
    case GET_AWAITABLE:
      return Op::kGetAwaitable;
    case GET_ITER:
      return Op::kGetIter;
    case GET_YIELD_FROM_ITER:
      return Op::kGetYieldFromIter;
    case FOR_ITER:
      return Op::kForIter;
    case SEND:
      return Op::kSend;
    case LOAD_BUILD_CLASS:
      return Op::kLoadBuildClass;
    case LOAD_ASSERTION_ERROR:
      return Op::kLoadAssertionError;
    case RETURN_GENERATOR:
      return Op::kReturnGenerator;
    case RETURN_VALUE:
      return Op::kReturn;
    case YIELD_VALUE:
      return Op::kYield;
    case SETUP_ANNOTATIONS:
      return Op::kSetupAnnotations;
    case LOAD_NAME:
      return Op::kLoadName;
    case STORE_NAME:
      return Op::kStoreName;
    case DELETE_NAME:
      return Op::kDeleteName;
    case LOAD_GLOBAL:
      return Op::kLoadGlobal;
    case STORE_GLOBAL:
      return Op::kStoreGlobal;
    case DELETE_GLOBAL:
      return Op::kDeleteGlobal;
    case STORE_ATTR:
      return Op::kStoreAttr;
    case DELETE_ATTR:
      return Op::kDeleteAttr;
    case LOAD_DEREF:
      return Op::kLoadDeref;
    case STORE_DEREF:
      return Op::kStoreDeref;
    case DELETE_DEREF:
      return Op::kDeleteDeref;
    case UNPACK_SEQUENCE:
      return Op::kUnpackSequence;
    case UNPACK_EX:
      return Op::kUnpackEx;
    case BUILD_TUPLE:
    case BUILD_LIST:
    case BUILD_SET:
    case BUILD_MAP:
    case BUILD_CONST_KEY_MAP:
    case BUILD_SLICE:
      return Op::kBuild;
    case BUILD_STRING:
      return Op::kBuildString;
    case LIST_EXTEND:
      return Op::kListExtend;
    case SET_UPDATE:
      return Op::kSetUpdate;
    case DICT_UPDATE:
      return Op::kDictUpdate;
    case DICT_MERGE:
      return Op::kDictMerge;
    case LIST_APPEND:
      return Op::kListAppend;
    case SET_ADD:
      return Op::kSetAdd;
    case MAP_ADD:
      return Op::kMapAdd;
    case IMPORT_NAME:
      return Op::kImportName;
    case IMPORT_FROM:
      return Op::kImportFrom;
    case MAKE_FUNCTION:
      return Op::kMakeFunction;
    case CALL_FUNCTION_EX:
      return Op::kCallEx;
#if CUVIL_PY311
    case LOAD_CLOSURE:
    case KW_NAMES:
      return Op::kPure;
    case LOAD_ATTR:
      return Op::kLoadAttr;
    case LOAD_METHOD:
      return Op::kLoadMethod;
    case LOAD_CLASSDEREF:
      return Op::kLoadClassDeref;
    case UNARY_POSITIVE:
      return Op::kUnaryPositive;
    case PRINT_EXPR:
      return Op::kPrintExpr;
    case LIST_TO_TUPLE:
      return Op::kListToTuple;
    case IMPORT_STAR:
      return Op::kImportStar;
    case ASYNC_GEN_WRAP:
      return Op::kAsyncGenWrap;
    case PREP_RERAISE_STAR:
      return Op::kIntrinsic2;
    case PRECALL:
    case CALL:
      return Op::kCall;
    case FORMAT_VALUE:
      return Op::kFormatValue;
    case JUMP_IF_FALSE_OR_POP:
    case JUMP_IF_TRUE_OR_POP:
    case POP_JUMP_FORWARD_IF_FALSE:
    case POP_JUMP_FORWARD_IF_TRUE:
    case POP_JUMP_BACKWARD_IF_FALSE:
    case POP_JUMP_BACKWARD_IF_TRUE:
      return Op::kBranchTruth;
    case POP_JUMP_FORWARD_IF_NONE:
    case POP_JUMP_FORWARD_IF_NOT_NONE:
    case POP_JUMP_BACKWARD_IF_NONE:
    case POP_JUMP_BACKWARD_IF_NOT_NONE:
      return Op::kBranchNone;
#else
    case END_FOR:
    case END_SEND:
    case CLEANUP_THROW:
    case LOAD_FAST_CHECK:
    case LOAD_FAST_AND_CLEAR:
      return Op::kPure;
    case LOAD_ATTR:
      return (oparg & 1) != 0 ? Op::kLoadMethod : Op::kLoadAttr;
    case LOAD_SUPER_ATTR:
      return Op::kLoadSuperAttr;
    case LOAD_LOCALS:
      return Op::kLoadLocals;
    case LOAD_FROM_DICT_OR_DEREF:
      return Op::kLoadClassDeref;
    case LOAD_FROM_DICT_OR_GLOBALS:
      return Op::kLoadFromDict;
    case BINARY_SLICE:
      return Op::kBinarySlice;
    case STORE_SLICE:
      return Op::kStoreSlice;
    case RETURN_CONST:
      return Op::kReturn;
    case CALL:
      return Op::kCall;
    case CALL_INTRINSIC_1:
      return ClassifyIntrinsic1(oparg);
    case CALL_INTRINSIC_2:
      return Op::kIntrinsic2;
    case POP_JUMP_IF_FALSE:
    case POP_JUMP_IF_TRUE:
      return Op::kBranchTruth;
    case POP_JUMP_IF_NONE:
    case POP_JUMP_IF_NOT_NONE:
      return Op::kBranchNone;
#endif
#if CUVIL_PY312
    case LOAD_CLOSURE:
    case KW_NAMES:
      return Op::kPure;
    case FORMAT_VALUE:
      return Op::kFormatValue;
#endif
#if CUVIL_PY313
    case LOAD_FAST_LOAD_FAST:
    case STORE_FAST_LOAD_FAST:
    case STORE_FAST_STORE_FAST:
      return Op::kPure;
    case TO_BOOL:
      return Op::kToBool;
    case CALL_KW:
      return Op::kCall;
    case CONVERT_VALUE:
      return Op::kConvertValue;
    case FORMAT_SIMPLE:
      return Op::kFormatSimple;
    case FORMAT_WITH_SPEC:
      return Op::kFormatWithSpec;
    case SET_FUNCTION_ATTRIBUTE:
      return Op::kSetFunctionAttribute;
#endif
    default:
      return Op::kUnknown;
  }
}

const char* OpName(Op op) noexcept {
  switch (op) {
#define CUVIL_OP(name) \
  case Op::k##name:    \
    return #name;
    CUVIL_OP(Unknown)
    CUVIL_OP(Pure)
    CUVIL_OP(LoadGlobal)
    CUVIL_OP(LoadName)
    CUVIL_OP(LoadAttr)
    CUVIL_OP(LoadMethod)
    CUVIL_OP(LoadSuperAttr)
    CUVIL_OP(LoadDeref)
    CUVIL_OP(LoadClassDeref)
    CUVIL_OP(LoadFromDict)
    CUVIL_OP(LoadBuildClass)
    CUVIL_OP(LoadLocals)
    CUVIL_OP(LoadAssertionError)
    CUVIL_OP(StoreAttr)
    CUVIL_OP(DeleteAttr)
    CUVIL_OP(StoreGlobal)
    CUVIL_OP(DeleteGlobal)
    CUVIL_OP(StoreName)
    CUVIL_OP(DeleteName)
    CUVIL_OP(StoreDeref)
    CUVIL_OP(DeleteDeref)
    CUVIL_OP(BinaryOp)
    CUVIL_OP(BinarySubscr)
    CUVIL_OP(StoreSubscr)
    CUVIL_OP(DeleteSubscr)
    CUVIL_OP(BinarySlice)
    CUVIL_OP(StoreSlice)
    CUVIL_OP(CompareOp)
    CUVIL_OP(ContainsOp)
    CUVIL_OP(IsOp)
    CUVIL_OP(UnaryNot)
    CUVIL_OP(UnaryNegative)
    CUVIL_OP(UnaryPositive)
    CUVIL_OP(UnaryInvert)
    CUVIL_OP(ToBool)
    CUVIL_OP(BranchTruth)
    CUVIL_OP(BranchNone)
    CUVIL_OP(GetIter)
    CUVIL_OP(ForIter)
    CUVIL_OP(GetLen)
    CUVIL_OP(UnpackSequence)
    CUVIL_OP(UnpackEx)
    CUVIL_OP(Call)
    CUVIL_OP(CallEx)
    CUVIL_OP(Build)
    CUVIL_OP(BuildString)
    CUVIL_OP(ListExtend)
    CUVIL_OP(ListToTuple)
    CUVIL_OP(SetUpdate)
    CUVIL_OP(DictUpdate)
    CUVIL_OP(DictMerge)
    CUVIL_OP(ListAppend)
    CUVIL_OP(SetAdd)
    CUVIL_OP(MapAdd)
    CUVIL_OP(MakeFunction)
    CUVIL_OP(SetFunctionAttribute)
    CUVIL_OP(ImportName)
    CUVIL_OP(ImportFrom)
    CUVIL_OP(ImportStar)
    CUVIL_OP(WithEnter)
    CUVIL_OP(WithExit)
    CUVIL_OP(AsyncWithEnter)
    CUVIL_OP(GetAiter)
    CUVIL_OP(GetAnext)
    CUVIL_OP(EndAsyncFor)
    CUVIL_OP(GetAwaitable)
    CUVIL_OP(AsyncGenWrap)
    CUVIL_OP(Raise)
    CUVIL_OP(Reraise)
    CUVIL_OP(PushExcInfo)
    CUVIL_OP(PopExcept)
    CUVIL_OP(CheckExcMatch)
    CUVIL_OP(CheckEgMatch)
    CUVIL_OP(MatchSequence)
    CUVIL_OP(MatchMapping)
    CUVIL_OP(MatchClass)
    CUVIL_OP(MatchKeys)
    CUVIL_OP(FormatValue)
    CUVIL_OP(FormatSimple)
    CUVIL_OP(FormatWithSpec)
    CUVIL_OP(ConvertValue)
    CUVIL_OP(Return)
    CUVIL_OP(Yield)
    CUVIL_OP(Send)
    CUVIL_OP(GetYieldFromIter)
    CUVIL_OP(ReturnGenerator)
    CUVIL_OP(SetupAnnotations)
    CUVIL_OP(Intrinsic1)
    CUVIL_OP(Intrinsic2)
    CUVIL_OP(PrintExpr)
#undef CUVIL_OP
  }
  return "Unknown";
}

PyObject* NameOperand(const FrameView& frame, const Site& site) noexcept {
  int index = site.oparg;
  switch (site.op) {
    case Op::kLoadGlobal:
      index >>= 1;
      break;
#if !CUVIL_PY311
    case Op::kLoadAttr:
    case Op::kLoadMethod:
      index >>= 1;
      break;
    case Op::kLoadSuperAttr:
      index >>= 2;
      break;
#else
    case Op::kLoadAttr:
    case Op::kLoadMethod:
#endif
    case Op::kLoadName:
    case Op::kLoadFromDict:
    case Op::kStoreAttr:
    case Op::kDeleteAttr:
    case Op::kStoreGlobal:
    case Op::kDeleteGlobal:
    case Op::kStoreName:
    case Op::kDeleteName:
    case Op::kImportName:
    case Op::kImportFrom:
      break;
    default:
      return nullptr;
  }
  PyObject* names = frame.code()->co_names;
  return index < PyTuple_GET_SIZE(names) ? PyTuple_GET_ITEM(names, index) : nullptr;
}

int KeyStride(const Site& site) noexcept {
  if (site.opcode == BUILD_SET) return 1;
  return site.opcode == BUILD_MAP ? 2 : 0;
}

int DerefIndex(const Site& site) noexcept { return site.oparg; }

int BinaryOpKind(const Site& site) noexcept { return site.oparg; }

int CompareKind(const Site& site) noexcept {
#if CUVIL_PY311
  return site.oparg;
#elif CUVIL_PY312
  return site.oparg >> 4;
#else
  return site.oparg >> 5;
#endif
}

bool CompareCoercesToBool(const Site& site) noexcept {
#if CUVIL_PY313
  return (site.oparg & 16) != 0;
#else
  static_cast<void>(site);
  return false;
#endif
}

bool Inverted(const Site& site) noexcept { return (site.oparg & 1) != 0; }

bool BranchSense(const Site& site) noexcept {
  switch (site.opcode) {
#if CUVIL_PY311
    case JUMP_IF_TRUE_OR_POP:
    case POP_JUMP_FORWARD_IF_TRUE:
    case POP_JUMP_BACKWARD_IF_TRUE:
    case POP_JUMP_FORWARD_IF_NONE:
    case POP_JUMP_BACKWARD_IF_NONE:
      return true;
#else
    case POP_JUMP_IF_TRUE:
    case POP_JUMP_IF_NONE:
      return true;
#endif
    default:
      return false;
  }
}

bool BranchKeepsValue(const Site& site) noexcept {
#if CUVIL_PY311
  return site.opcode == JUMP_IF_TRUE_OR_POP || site.opcode == JUMP_IF_FALSE_OR_POP;
#else
  static_cast<void>(site);
  return false;
#endif
}

bool SuperIsMethod(const Site& site) noexcept { return site.op == Op::kLoadSuperAttr && (site.oparg & 1) != 0; }

BuildKind GetBuildKind(const Site& site) noexcept {
  switch (site.opcode) {
    case BUILD_LIST:
      return BuildKind::kList;
    case BUILD_SET:
      return BuildKind::kSet;
    case BUILD_MAP:
      return BuildKind::kMap;
    case BUILD_CONST_KEY_MAP:
      return BuildKind::kConstKeyMap;
    case BUILD_SLICE:
      return BuildKind::kSlice;
    default:
      return BuildKind::kTuple;
  }
}

bool DecodeCall(const FrameView& frame, const Site& site, PyObject** stack_top, CallSiteView* call) noexcept {
  if (site.op != Op::kCall) return false;
  const int num_args = site.oparg;
  call->nargs = num_args;
#if CUVIL_PY313
  // callable, self or null, arguments; CALL_KW: then the names
  call->kwnames = nullptr;
  if (site.opcode == CALL_KW) call->kwnames = *--stack_top;
  call->args = stack_top - num_args;
  call->self_or_null = stack_top[-num_args - 1];
  call->callable = stack_top[-num_args - 2];
  static_cast<void>(frame);
#else
  // null and callable, or method and self; then the arguments
  call->kwnames = site.kwnames < 0 ? nullptr : PyTuple_GET_ITEM(frame.code()->co_consts, site.kwnames);
  call->args = stack_top - num_args;
  PyObject* method = stack_top[-num_args - 2];
  PyObject* other = stack_top[-num_args - 1];
  call->callable = method != nullptr ? method : other;
  call->self_or_null = method != nullptr ? other : nullptr;
#endif
  return call->callable != nullptr;
}

bool DecodeCallEx(const FrameView& frame, const Site& site, PyObject** stack_top, CallExView* call) noexcept {
  static_cast<void>(frame);
  if (site.op != Op::kCallEx) return false;
  call->keywords = (site.oparg & 1) != 0 ? *--stack_top : nullptr;
  call->positional = stack_top[-1];
#if CUVIL_PY313
  call->callable = stack_top[-3];  // then null
#else
  call->callable = stack_top[-2];  // null before it
#endif
  return call->callable != nullptr;
}

namespace compat {

int CacheUnits(int opcode) { return CuvilOpcodeCaches(opcode); }
bool HasJump(int opcode) { return CuvilOpcodeHasJump(opcode) != 0; }

bool IsBackwardJump(int opcode) {
  switch (opcode) {
    case JUMP_BACKWARD:
    case JUMP_BACKWARD_NO_INTERRUPT:
#if CUVIL_PY311
    case POP_JUMP_BACKWARD_IF_FALSE:
    case POP_JUMP_BACKWARD_IF_TRUE:
    case POP_JUMP_BACKWARD_IF_NONE:
    case POP_JUMP_BACKWARD_IF_NOT_NONE:
#endif
      return true;
    default:
      return false;
  }
}

bool FallsThrough(int opcode) {
  switch (opcode) {
    case RETURN_VALUE:
    case RERAISE:
    case RAISE_VARARGS:
    case JUMP_FORWARD:
    case JUMP_BACKWARD:
    case JUMP_BACKWARD_NO_INTERRUPT:
#if !CUVIL_PY311
    case RETURN_CONST:
    case INTERPRETER_EXIT:
#endif
      return false;
    default:
      return true;
  }
}

bool TopIsObject(int opcode) {
  switch (opcode) {
    case LOAD_ATTR:
    case STORE_ATTR:
    case STORE_SUBSCR:
    case BINARY_SUBSCR:
    case BINARY_OP:
    case COMPARE_OP:
    case CONTAINS_OP:
    case IS_OP:
    case GET_ITER:
    case FOR_ITER:
    case RETURN_VALUE:
    case UNPACK_SEQUENCE:
    case STORE_NAME:
    case STORE_GLOBAL:
    case STORE_DEREF:
    case YIELD_VALUE:
    case UNARY_NOT:
    case UNARY_NEGATIVE:
    case LIST_APPEND:
    case MAP_ADD:
    case SET_ADD:
    case BEFORE_WITH:
    case IMPORT_NAME:
    case IMPORT_FROM:
#if CUVIL_PY311
    case LOAD_METHOD:
    case POP_JUMP_FORWARD_IF_FALSE:
    case POP_JUMP_FORWARD_IF_TRUE:
#else
    case POP_JUMP_IF_FALSE:
    case POP_JUMP_IF_TRUE:
#endif
      return true;
    default:
      return false;
  }
}

bool ProbeAllowedBetween(int previous_opcode, int opcode) {
  if (opcode == RESUME) return false;  // generator methods look for it right behind YIELD_VALUE
  // 3.11's line tracing knows a backward jump that lands on SEND; throw() and close() know SEND, YIELD_VALUE, RESUME.
  if (opcode == SEND || previous_opcode == SEND) return false;
#if !CUVIL_PY311
  // FOR_ITER and SEND reach what follows these by position, and an exhausted FOR_ITER skips END_FOR.
  if (opcode == END_FOR || opcode == END_SEND || opcode == CLEANUP_THROW) return false;
#endif
#if CUVIL_PY313
  if (previous_opcode == END_FOR) return false;  // ... together with the POP_TOP behind it
#endif
  return true;
}

bool IsKwNames(int opcode) {
#if CUVIL_PY313
  static_cast<void>(opcode);
  return false;
#else
  return opcode == KW_NAMES;
#endif
}

bool IsSecondHalfOfCall(int previous_opcode, int opcode) {
#if CUVIL_PY311
  return previous_opcode == PRECALL && opcode == CALL;
#else
  static_cast<void>(previous_opcode), static_cast<void>(opcode);
  return false;
#endif
}

bool MustNotSpecialize(int opcode) {
#if CUVIL_PY313
  return opcode == CALL;
#else
  static_cast<void>(opcode);
  return false;
#endif
}

void ForbidSpecialization(_Py_CODEUNIT* instruction) {
#if CUVIL_PY313
  instruction[1].cache = 0xFFFF;  // UNREACHABLE_BACKOFF, Include/internal/pycore_backoff.h
#else
  static_cast<void>(instruction);
#endif
}

}  // namespace compat
}  // namespace cuvil::agent
