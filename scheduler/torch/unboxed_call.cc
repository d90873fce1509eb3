#include "scheduler/torch/unboxed_call.h"

#include <array>
#include <cstring>
#include <limits>
#include <new>
#include <string>

#include "absl/strings/str_cat.h"
#include "scheduler/torch/boundary.h"
#include "scheduler/torch/cpp_abi.h"
#include "scheduler/torch/mangling.h"

namespace cuvil::torch_abi {
namespace {

using cir::ArgKind;
using cir::Attr;
using cir::ResultForm;
using cir::ReturnKind;

constexpr size_t kInlineScratch = 40;  // words; index lists and cats of up to about ten tensors fit
constexpr uint32_t kTensorWords = 1;
constexpr uint32_t kVectorWords = 3;

uint64_t Address(const void* pointer) { return reinterpret_cast<uint64_t>(pointer); }

bool EncodeScalar(const Attr& attr, ScalarLayout* out) {
  if (const auto* v = attr.get_if<bool>()) {
    out->tag = ScalarLayout::kBool;
    out->value[0] = *v ? 1 : 0;
  } else if (const auto* v = attr.get_if<int64_t>()) {
    out->tag = ScalarLayout::kInt;
    out->value[0] = static_cast<uint64_t>(*v);
  } else if (const auto* v = attr.get_if<double>()) {
    out->tag = ScalarLayout::kDouble;
    out->value[0] = std::bit_cast<uint64_t>(*v);
  } else if (const auto* v = attr.get_if<std::complex<double>>()) {
    out->tag = ScalarLayout::kComplex;
    out->value[0] = std::bit_cast<uint64_t>(v->real());
    out->value[1] = std::bit_cast<uint64_t>(v->imag());
  } else {
    return false;
  }
  return true;
}

// A SymInt holds plain numbers down to this; what is below is a pointer in disguise.
constexpr int64_t kMinPlainSymInt = -(int64_t{1} << 62);

}  // namespace

class UnboxedCallBuilder {
 public:
  UnboxedCallBuilder(const TorchApi& api, const cir::Op& op, const AbiFeatures& features)
      : api_(api), op_(op), features_(features) {}

  absl::StatusOr<UnboxedCall> Build() {
    if (!kKnownCppAbi || !features_.unboxed) return absl::NotFoundError("the C++ ABI is not in use");
    if (absl::Status s = FindFunction(); !s.ok()) return s;
    if (absl::Status s = PlanReturns(); !s.ok()) return s;
    for (size_t i = 0; i < op_.operands.size(); ++i) {
      if (!Pack(op_.kinds[i], op_.operands[i])) {
        return absl::NotFoundError(
            absl::StrCat("argument ", i, " of type ", cir::ArgKindName(op_.kinds[i]), " has no encoding"));
      }
    }
    if (packer_.num_stack() > kMaxStack) return absl::NotFoundError("too many arguments");
    call_.num_stack_ = packer_.num_stack();
    call_.uses_vector_ = packer_.uses_vector();
    call_.words_ = std::move(packer_).Take();
    // What CallWords reads beyond the callee's own words.
    call_.words_.resize(static_cast<size_t>(kFirstStack + StackWordsRead(call_.num_stack_)), 0);
    return std::move(call_);
  }

 private:
  absl::Status FindFunction() {
    for (const SignatureVariant& variant : SignatureVariants(op_)) {
      const std::string symbol = UnboxedSymbol(op_, variant);
      if (symbol.empty()) break;
      call_.function_ = api_.FindSymbol(symbol.c_str());
      variant_ = variant;
      if (call_.function_ != nullptr) return absl::OkStatus();
    }
    return absl::NotFoundError(absl::StrCat("no entry point for ", cir::QualifiedName(op_)));
  }

  absl::Status PlanReturns() {
    using ReturnForm = UnboxedCall::ReturnForm;
    size_t num_aliases = 0;
    for (const cir::Result& result : op_.results) num_aliases += result.returned == ReturnKind::kTensorAlias;
    if (op_.results.empty()) {
      call_.return_form_ = ReturnForm::kVoid;
      return absl::OkStatus();
    }
    if (num_aliases > 0) {
      // A tuple of references is classified differently by its length; such out= operators go another way.
      if (op_.results.size() > 1) return absl::NotFoundError("returns several references");
      call_.return_form_ = ReturnForm::kReference;
      return absl::OkStatus();
    }
    // libstdc++'s tuple stores its elements in reverse order.
    uint32_t offset = 0;
    call_.returns_.resize(op_.results.size());
    for (size_t i = op_.results.size(); i-- > 0;) {
      const cir::Result& result = op_.results[i];
      const bool is_list = result.returned == ReturnKind::kTensorList;
      if (is_list && !features_.tensor_lists) return absl::NotFoundError("lists of tensors are not in use");
      UnboxedCall::Return& slot = call_.returns_[i];
      slot = {result.form, is_list, offset, static_cast<uint32_t>(call_.results_.size()),
              static_cast<uint32_t>(result.values.size())};
      for (cir::ValueId id : result.values) call_.results_.push_back(id.index);
      offset += is_list ? kVectorWords : kTensorWords;
    }
    const bool one_cell =
        op_.results.size() == 1 && !call_.returns_[0].is_list && call_.returns_[0].form == ResultForm::kNew;
    call_.return_form_ = one_cell ? ReturnForm::kTensor : ReturnForm::kTuple;
    if (!one_cell) call_.return_scratch_ = Scratch(offset);
    // The address of the returned object is a hidden first argument; Invoke fills it in.
    packer_.Integer(0);
    return absl::OkStatus();
  }

  uint32_t Scratch(uint32_t words) {
    const uint32_t at = call_.scratch_words_;
    call_.scratch_words_ += words;
    return at;
  }

  uint64_t* Constant(size_t words) {
    call_.constants_.push_back(std::make_unique<uint64_t[]>(words));
    return call_.constants_.back().get();
  }

  void AddPatch(UnboxedCall::PatchKind kind, int word, size_t count, uint32_t scratch, size_t first) {
    call_.patches_.push_back(
        {kind, static_cast<uint16_t>(word), static_cast<uint16_t>(count), scratch, static_cast<uint32_t>(first)});
  }

  // A parameter that the callee owns and may move from is passed by the address of a copy made for each call.
  void PackCopy(std::initializer_list<uint64_t> words) {
    const size_t first = call_.copies_.size();
    call_.copies_.insert(call_.copies_.end(), words);
    const int word = packer_.Integer(0);
    AddPatch(UnboxedCall::PatchKind::kCopy, word, words.size(), Scratch(static_cast<uint32_t>(words.size())), first);
  }

  bool Pack(ArgKind kind, const cir::Operand& operand) {
    if (const auto* value = std::get_if<cir::ValueId>(&operand)) return PackTensor(kind, *value);
    if (const auto* list = std::get_if<cir::ValueList>(&operand)) return PackTensorList(kind, *list);
    const Attr& attr = std::get<Attr>(operand);
    switch (kind) {
      case ArgKind::kTensor:
      case ArgKind::kOptionalTensor:
        return PackNumberAsTensor(kind, attr);
      case ArgKind::kScalar:
      case ArgKind::kOptionalScalar:
      case ArgKind::kScalarList:
        return features_.scalars && PackScalar(kind, attr);
      case ArgKind::kSymInt:
      case ArgKind::kOptionalSymInt:
        return features_.symints && PackSymInt(kind, attr);
      case ArgKind::kString:
      case ArgKind::kOptionalString:
        return features_.strings && PackString(kind, attr);
      case ArgKind::kInt:
        packer_.Integer(static_cast<uint64_t>(*attr.get_if<int64_t>()));
        return true;
      case ArgKind::kOptionalInt: {
        const auto* v = attr.get_if<int64_t>();
        packer_.IntegerPair(v != nullptr ? static_cast<uint64_t>(*v) : 0, v != nullptr);
        return true;
      }
      case ArgKind::kIntList:
      case ArgKind::kOptionalIntList:
      case ArgKind::kSymIntList:
      case ArgKind::kOptionalSymIntList:
        return PackIntList(kind, attr);
      case ArgKind::kFloat:
        packer_.Double(*attr.get_if<double>());
        return true;
      case ArgKind::kOptionalFloat: {
        const auto* v = attr.get_if<double>();
        packer_.DoubleAndInteger(v != nullptr ? *v : 0.0, v != nullptr);
        return true;
      }
      case ArgKind::kFloatList:
      case ArgKind::kOptionalFloatList:
        return PackFloatList(kind, attr);
      case ArgKind::kBool:
        packer_.Integer(*attr.get_if<bool>() ? 1 : 0);
        return true;
      case ArgKind::kOptionalBool:
        PackOptionalByte(attr.get_if<bool>() != nullptr, attr.get_if<bool>() != nullptr && *attr.get_if<bool>());
        return true;
      case ArgKind::kBoolArray2:
      case ArgKind::kBoolArray3:
      case ArgKind::kBoolArray4: {
        uint64_t word = 0;
        const auto& bools = *attr.get_if<std::vector<bool>>();
        for (size_t i = 0; i < bools.size(); ++i) word |= uint64_t{bools[i]} << (8 * i);
        packer_.Integer(word);
        return true;
      }
      case ArgKind::kScalarType:
      case ArgKind::kOptionalScalarType:
        return PackByteEnum<cir::DType>(kind == ArgKind::kOptionalScalarType, attr);
      case ArgKind::kLayout:
      case ArgKind::kOptionalLayout:
        return PackByteEnum<cir::Layout>(kind == ArgKind::kOptionalLayout, attr);
      case ArgKind::kMemoryFormat:
      case ArgKind::kOptionalMemoryFormat:
        return PackByteEnum<cir::MemoryFormat>(kind == ArgKind::kOptionalMemoryFormat, attr);
      case ArgKind::kDevice:
      case ArgKind::kOptionalDevice:
        return PackDevice(kind, attr);
      case ArgKind::kOptionalGenerator:
        // None and the default generator are the same thing to an operator.
        PackCopy({0, 0});
        return true;
      case ArgKind::kGenerator:
      case ArgKind::kBoolList:
      case ArgKind::kTensorList:
      case ArgKind::kOptionalTensorList:
      case ArgKind::kOptionalTensorElementList:
        return false;
    }
    return false;
  }

  bool PackTensor(ArgKind kind, cir::ValueId value) {
    const size_t first = call_.operands_.size();
    call_.operands_.push_back(value.index);
    const int word = packer_.Integer(0);
    if (kind == ArgKind::kTensor) {
      AddPatch(UnboxedCall::PatchKind::kTensor, word, 1, 0, first);
    } else {
      AddPatch(UnboxedCall::PatchKind::kOptional, word, 1, Scratch(2), first);
    }
    return true;
  }

  bool PackTensorList(ArgKind kind, const cir::ValueList& list) {
    if (kind != ArgKind::kTensorList || !features_.tensor_lists) return false;
    if (list.size() > std::numeric_limits<uint16_t>::max()) return false;
    const size_t first = call_.operands_.size();
    for (const auto& id : list) call_.operands_.push_back(id->index);
    const auto count = static_cast<uint32_t>(list.size());
    if (variant_.list_ref) {
      const int word = packer_.Integer(0);
      AddPatch(UnboxedCall::PatchKind::kListRef, word, count, Scratch(3 + count), first);
    } else {
      const int word = packer_.IntegerPair(0, count);
      AddPatch(UnboxedCall::PatchKind::kArray, word, count, Scratch(count), first);
    }
    return true;
  }

  bool PackNumberAsTensor(ArgKind kind, const Attr& attr) {
    if (attr.is_none()) {
      packer_.Integer(Address(Constant(2)));
      return true;
    }
    absl::StatusOr<OwnedTensor> number = api_.MakeWrappedNumber(attr);
    if (!number.ok()) return false;
    if (kind == ArgKind::kTensor) {
      packer_.Integer(Address(number->ref().handle()));
    } else {
      uint64_t* optional = Constant(2);
      optional[0] = Address(number->ref().impl());
      optional[1] = 1;
      packer_.Integer(Address(optional));
    }
    call_.numbers_.push_back(*std::move(number));
    return true;
  }

  bool PackScalar(ArgKind kind, const Attr& attr) {
    if (kind == ArgKind::kScalarList) {
      const auto& list = *attr.get_if<std::vector<Attr>>();
      uint64_t* words = Constant(kScalarWords * list.size() + 1);
      for (size_t i = 0; i < list.size(); ++i) {
        ScalarLayout scalar;
        if (!EncodeScalar(list[i], &scalar)) return false;
        std::memcpy(words + kScalarWords * i, &scalar, sizeof(scalar));
      }
      packer_.IntegerPair(Address(words), list.size());
      return true;
    }
    uint64_t* words = Constant(kOptionalScalarWords);
    if (!attr.is_none()) {
      ScalarLayout scalar;
      if (!EncodeScalar(attr, &scalar)) return false;
      std::memcpy(words, &scalar, sizeof(scalar));
      words[kScalarWords] = 1;
    }
    packer_.Integer(Address(words));
    return true;
  }

  bool PackSymInt(ArgKind kind, const Attr& attr) {
    const auto* v = attr.get_if<int64_t>();
    if (v != nullptr && *v < kMinPlainSymInt) return false;
    const uint64_t word = v != nullptr ? static_cast<uint64_t>(*v) : 0;
    if (kind == ArgKind::kSymInt) {
      PackCopy({word});
    } else {
      PackCopy({word, v != nullptr});
    }
    return true;
  }

  bool PackIntList(ArgKind kind, const Attr& attr) {
    const bool is_optional = kind == ArgKind::kOptionalIntList || kind == ArgKind::kOptionalSymIntList;
    const bool is_sym = kind == ArgKind::kSymIntList || kind == ArgKind::kOptionalSymIntList;
    const auto* list = attr.get_if<std::vector<int64_t>>();
    if (list == nullptr) {
      packer_.Memory({0, 0, 0});
      return is_optional;
    }
    uint64_t* words = Constant(list->size() + 1);
    for (size_t i = 0; i < list->size(); ++i) {
      if (is_sym && (*list)[i] < kMinPlainSymInt) return false;
      words[i] = static_cast<uint64_t>((*list)[i]);
    }
    if (is_optional) {
      packer_.Memory({Address(words), list->size(), 1});
    } else {
      packer_.IntegerPair(Address(words), list->size());
    }
    return true;
  }

  bool PackFloatList(ArgKind kind, const Attr& attr) {
    const auto* list = attr.get_if<std::vector<double>>();
    if (list == nullptr) {
      packer_.Memory({0, 0, 0});
      return kind == ArgKind::kOptionalFloatList;
    }
    uint64_t* words = Constant(list->size() + 1);
    for (size_t i = 0; i < list->size(); ++i) words[i] = std::bit_cast<uint64_t>((*list)[i]);
    if (kind == ArgKind::kOptionalFloatList) {
      packer_.Memory({Address(words), list->size(), 1});
    } else {
      packer_.IntegerPair(Address(words), list->size());
    }
    return true;
  }

  bool PackString(ArgKind kind, const Attr& attr) {
    const auto* text = attr.get_if<std::string>();
    if (text == nullptr) {
      packer_.Memory({0, 0, 0});
      return kind == ArgKind::kOptionalString;
    }
    uint64_t* words = Constant(text->size() / sizeof(uint64_t) + 1);
    std::memcpy(words, text->data(), text->size());
    // libstdc++'s string_view: the length comes first.
    if (kind == ArgKind::kString) {
      packer_.IntegerPair(text->size(), Address(words));
    } else {
      packer_.Memory({text->size(), Address(words), 1});
    }
    return true;
  }

  // std::optional of a one-byte type: the value, then the flag.
  void PackOptionalByte(bool present, uint64_t byte) {
    packer_.Integer(present ? (byte & 0xff) | (uint64_t{1} << 8) : 0);
  }

  template <typename Enum>
  bool PackByteEnum(bool is_optional, const Attr& attr) {
    const auto* v = attr.get_if<Enum>();
    if (is_optional) {
      PackOptionalByte(v != nullptr, v != nullptr ? static_cast<uint64_t>(static_cast<uint8_t>(*v)) : 0);
      return true;
    }
    if (v == nullptr) return false;
    packer_.Integer(static_cast<uint64_t>(static_cast<uint8_t>(*v)));
    return true;
  }

  bool PackDevice(ArgKind kind, const Attr& attr) {
    const auto* device = attr.get_if<cir::Device>();
    if (device == nullptr) {
      packer_.Integer(0);
      return kind == ArgKind::kOptionalDevice;
    }
    uint64_t word = static_cast<uint8_t>(device->type) | uint64_t{static_cast<uint8_t>(device->index)} << 8;
    if (kind == ArgKind::kOptionalDevice) word |= uint64_t{1} << 16;
    packer_.Integer(word);
    return true;
  }

  const TorchApi& api_;
  const cir::Op& op_;
  const AbiFeatures& features_;
  SignatureVariant variant_;
  ArgumentPacker packer_;
  UnboxedCall call_;
};

absl::StatusOr<UnboxedCall> UnboxedCall::Create(const TorchApi& api, const cir::Op& op, const AbiFeatures& features) {
  return UnboxedCallBuilder(api, op, features).Build();
}

absl::Status UnboxedCall::Invoke(const TorchApi& api, void** cells) const {
  uint64_t words[kMaxWords];
  std::memcpy(words, words_.data(), words_.size() * sizeof(uint64_t));

  std::array<uint64_t, kInlineScratch> inline_scratch;
  std::unique_ptr<uint64_t[]> heap_scratch;
  uint64_t* scratch = inline_scratch.data();
  if (scratch_words_ > kInlineScratch) {
    heap_scratch = std::make_unique_for_overwrite<uint64_t[]>(scratch_words_);
    scratch = heap_scratch.get();
  }

  for (const Patch& patch : patches_) {
    uint64_t* space = scratch + patch.scratch;
    switch (patch.kind) {
      case PatchKind::kTensor:
        words[patch.word] = Address(cells + operands_[patch.first]);
        break;
      case PatchKind::kOptional:
        space[0] = Address(cells[operands_[patch.first]]);
        space[1] = 1;
        words[patch.word] = Address(space);
        break;
      case PatchKind::kArray:
        for (uint32_t i = 0; i < patch.count; ++i) space[i] = Address(cells[operands_[patch.first + i]]);
        words[patch.word] = Address(space);
        break;
      case PatchKind::kListRef:
        for (uint32_t i = 0; i < patch.count; ++i) space[3 + i] = Address(cells[operands_[patch.first + i]]);
        space[0] = Address(space + 3);
        space[1] = patch.count;
        space[2] = 0;  // the tag of an unboxed list
        words[patch.word] = Address(space);
        break;
      case PatchKind::kCopy:
        for (uint32_t i = 0; i < patch.count; ++i) space[i] = copies_[patch.first + i];
        words[patch.word] = Address(space);
        break;
    }
  }

  uint64_t* returned = scratch + return_scratch_;
  if (return_form_ == ReturnForm::kTensor) {
    words[0] = Address(cells + results_[0]);
  } else if (return_form_ == ReturnForm::kTuple) {
    words[0] = Address(returned);
  }
  absl::Status status = CallForeign([&] { CallWords(function_, words, num_stack_, uses_vector_); });
  if (!status.ok() || return_form_ != ReturnForm::kTuple) return status;
  return StoreReturns(api, cells, returned);
}

absl::Status UnboxedCall::StoreReturns(const TorchApi& api, void** cells, uint64_t* returned) const {
  absl::Status first_error;
  for (const Return& slot : returns_) {
    uint64_t* source = returned + slot.offset;
    const absl::Status status = slot.is_list ? StoreList(api, cells, slot, source)
                                             : StoreTensor(api, cells, slot, reinterpret_cast<void**>(source));
    if (!status.ok() && first_error.ok()) first_error = status;
  }
  return first_error;
}

absl::Status UnboxedCall::StoreTensor(const TorchApi& api, void** cells, const Return& slot, void** source) const {
  if (slot.form == ResultForm::kNew) {
    cells[results_[slot.first]] = *source;
    return absl::OkStatus();
  }
  const bool differs = slot.form == ResultForm::kSame && *source != cells[results_[slot.first]];
  api.Drop(source);
  if (differs) return absl::InternalError("returned another object than in the trace");
  return absl::OkStatus();
}

absl::Status UnboxedCall::StoreList(const TorchApi& api, void** cells, const Return& slot, uint64_t* source) const {
  // libstdc++'s vector: begin, end, end of capacity.
  auto** begin = reinterpret_cast<void**>(source[0]);
  auto** end = reinterpret_cast<void**>(source[1]);
  const auto count = static_cast<size_t>(end - begin);
  const bool fits = slot.form == ResultForm::kList && count == slot.count;
  for (size_t i = 0; i < count; ++i) {
    if (fits) {
      cells[results_[slot.first + i]] = begin[i];
    } else {
      api.Drop(begin + i);
    }
  }
  ::operator delete(begin);
  if (slot.form == ResultForm::kList && !fits) {
    return absl::InternalError(absl::StrCat("returned ", count, " tensors, ", slot.count, " in the trace"));
  }
  return absl::OkStatus();
}

}  // namespace cuvil::torch_abi
