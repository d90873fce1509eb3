#include "scheduler/torch/mangling.h"

#include <gtest/gtest.h>

#include "jit/cir/schema.h"

namespace cuvil::torch_abi {
namespace {

std::string Symbol(const char* text, SignatureVariant variant = {}) {
  const auto schema = cir::ParseSchema(text);
  EXPECT_TRUE(schema.ok()) << schema.status();
  cir::Op op;
  op.name = schema->name;
  op.overload = schema->overload;
  for (const auto& argument : schema->arguments) op.kinds.push_back(argument.kind);
  op.effects.writes = schema->written_arguments();
  return UnboxedSymbol(op, variant);
}

// The expected names are what `nm -D libtorch_cpu.so` of torch 2.11 and 2.15 prints.
TEST(ManglingTest, SpellsTensorsAndNumbers) {
  EXPECT_EQ(Symbol("aten::add_.Tensor(Tensor(a!) self, Tensor other, *, Scalar alpha=1) -> Tensor(a!)"),
            "_ZN2at4_ops11add__Tensor4callERNS_6TensorERKS2_RKN3c106ScalarE");
  EXPECT_EQ(Symbol("aten::mul.Scalar(Tensor self, Scalar other) -> Tensor"),
            "_ZN2at4_ops10mul_Scalar4callERKNS_6TensorERKN3c106ScalarE");
  EXPECT_EQ(Symbol("aten::clamp(Tensor self, Scalar? min=None, Scalar? max=None) -> Tensor"),
            "_ZN2at4_ops5clamp4callERKNS_6TensorERKSt8optionalIN3c106ScalarEESA_");
}

TEST(ManglingTest, ReusesTemplatesAndPrefixes) {
  EXPECT_EQ(Symbol("aten::scaled_dot_product_attention(Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None, "
                   "float dropout_p=0.0, bool is_causal=False, *, float? scale=None, bool enable_gqa=False) -> Tensor"),
            "_ZN2at4_ops28scaled_dot_product_attention4callERKNS_6TensorES4_S4_RKSt8optionalIS2_EdbS5_IdEb");
  EXPECT_EQ(Symbol("aten::conv2d(Tensor input, Tensor weight, Tensor? bias=None, SymInt[2] stride=1, SymInt[2] "
                   "padding=0, SymInt[2] dilation=1, SymInt groups=1) -> Tensor"),
            "_ZN2at4_ops6conv2d4callERKNS_6TensorES4_RKSt8optionalIS2_EN3c108ArrayRefINS9_6SymIntEEESC_SC_SB_");
  EXPECT_EQ(
      Symbol("aten::upsample_bilinear2d.vec(Tensor input, SymInt[]? output_size, bool align_corners, float[]? "
             "scale_factors) -> Tensor"),
      "_ZN2at4_ops23upsample_bilinear2d_vec4callERKNS_6TensorEN3c1016OptionalArrayRefINS5_6SymIntEEEbSt8optionalINS5_"
      "8ArrayRefIdEEE");
  EXPECT_EQ(Symbol("aten::empty.memory_format(SymInt[] size, *, ScalarType? dtype=None, Layout? layout=None, Device? "
                   "device=None, bool? pin_memory=None, MemoryFormat? memory_format=None) -> Tensor"),
            "_ZN2at4_ops19empty_memory_format4callEN3c108ArrayRefINS2_6SymIntEEESt8optionalINS2_10ScalarTypeEES6_INS2_"
            "6LayoutEES6_INS2_6DeviceEES6_IbES6_INS2_12MemoryFormatEE");
}

TEST(ManglingTest, SpellsStringsListsAndGenerators) {
  EXPECT_EQ(Symbol("aten::div.Tensor_mode(Tensor self, Tensor other, *, str? rounding_mode) -> Tensor"),
            "_ZN2at4_ops15div_Tensor_mode4callERKNS_6TensorES4_St8optionalISt17basic_string_viewIcSt11char_"
            "traitsIcEEE");
  EXPECT_EQ(Symbol("aten::cat(Tensor[] tensors, int dim=0) -> Tensor", {.list_ref = true}),
            "_ZN2at4_ops3cat4callERKN3c108IListRefINS_6TensorEEEl");
  EXPECT_EQ(Symbol("aten::uniform_(Tensor(a!) self, float from=0, float to=1, *, Generator? generator=None) -> "
                   "Tensor(a!)"),
            "_ZN2at4_ops8uniform_4callERNS_6TensorEddSt8optionalINS_9GeneratorEE");
  EXPECT_EQ(Symbol("aten::index.Tensor(Tensor self, Tensor?[] indices) -> Tensor"),
            "_ZN2at4_ops12index_Tensor4callERKNS_6TensorERKN3c104ListISt8optionalIS2_EEE");
  EXPECT_EQ(Symbol("aten::resize_(Tensor(a!) self, SymInt[] size, *, MemoryFormat? memory_format=None) -> Tensor(a!)",
                   {.const_written = true}),
            "_ZN2at4_ops7resize_4callERKNS_6TensorEN3c108ArrayRefINS5_6SymIntEEESt8optionalINS5_12MemoryFormatEE");
}

TEST(ManglingTest, KnowsNothingOfOtherNamespaces) {
  EXPECT_EQ(Symbol("torchvision::nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"), "");
}

}  // namespace
}  // namespace cuvil::torch_abi
