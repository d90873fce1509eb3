#include "jit/cir/schema.h"

#include <gtest/gtest.h>

namespace cuvil::cir {
namespace {

TEST(SchemaTest, ReadsArgumentsAndDefaults) {
  const auto schema = ParseSchema(
      "aten::conv2d(Tensor input, Tensor weight, Tensor? bias=None, SymInt[2] stride=1, SymInt[2] padding=[0, 3], "
      "SymInt[2] dilation=1, SymInt groups=1) -> Tensor");
  ASSERT_TRUE(schema.ok()) << schema.status();
  EXPECT_EQ(schema->name, "aten::conv2d");
  EXPECT_EQ(schema->overload, "");
  ASSERT_EQ(schema->arguments.size(), 7u);
  EXPECT_EQ(schema->arguments[0].kind, ArgKind::kTensor);
  EXPECT_FALSE(schema->arguments[0].default_value.has_value());
  EXPECT_EQ(schema->arguments[2].kind, ArgKind::kOptionalTensor);
  EXPECT_EQ(schema->arguments[2].default_value, Attr(NoneAttr{}));
  EXPECT_EQ(schema->arguments[3].default_value, Attr(std::vector<int64_t>{1, 1}));
  EXPECT_EQ(schema->arguments[4].default_value, Attr(std::vector<int64_t>{0, 3}));
  EXPECT_EQ(schema->arguments[6].default_value, Attr(int64_t{1}));
  EXPECT_EQ(schema->returns, std::vector<ReturnKind>{ReturnKind::kTensor});
  EXPECT_EQ(schema->written_arguments(), 0u);
}

TEST(SchemaTest, ReadsAliasAnnotations) {
  const auto in_place =
      ParseSchema("aten::add_.Tensor(Tensor(a!) self, Tensor other, *, Scalar alpha=1) -> Tensor(a!)");
  ASSERT_TRUE(in_place.ok()) << in_place.status();
  EXPECT_EQ(in_place->overload, "Tensor");
  EXPECT_EQ(in_place->written_arguments(), 1u);
  EXPECT_EQ(in_place->returns, std::vector<ReturnKind>{ReturnKind::kTensorAlias});
  EXPECT_FALSE(in_place->arguments[1].kwarg_only);
  EXPECT_TRUE(in_place->arguments[2].kwarg_only);
  EXPECT_FALSE(in_place->returns_view);

  const auto views = ParseSchema("aten::chunk(Tensor(a -> *) self, int chunks, int dim=0) -> Tensor(a)[]");
  ASSERT_TRUE(views.ok()) << views.status();
  EXPECT_TRUE(views->arguments[0].is_aliased);
  EXPECT_FALSE(views->arguments[0].is_written);
  EXPECT_TRUE(views->returns_view);
  EXPECT_EQ(views->returns, std::vector<ReturnKind>{ReturnKind::kTensorList});

  const auto outs = ParseSchema(
      "aten::max.dim_max(Tensor self, int dim, bool keepdim=False, *, Tensor(a!) max, Tensor(b!) max_values) -> "
      "(Tensor(a!) values, Tensor(b!) indices)");
  ASSERT_TRUE(outs.ok()) << outs.status();
  EXPECT_EQ(outs->written_arguments(), 0b11000u);
  EXPECT_EQ(outs->returns, (std::vector<ReturnKind>{ReturnKind::kTensorAlias, ReturnKind::kTensorAlias}));
}

TEST(SchemaTest, ReadsDefaultsByKind) {
  const auto schema = ParseSchema(
      "x::y(float p=1, float q=0.10000000000000001, int[] l=[], bool[3] m=[True, False, True], str s=\"a, \\\"b\", "
      "MemoryFormat f=contiguous_format, MemoryFormat g=0, ScalarType? t=6, Scalar a=2.) -> ()");
  ASSERT_TRUE(schema.ok()) << schema.status();
  ASSERT_EQ(schema->arguments.size(), 9u);
  EXPECT_EQ(schema->arguments[0].default_value, Attr(1.0));
  EXPECT_EQ(schema->arguments[1].default_value, Attr(0.1));
  EXPECT_EQ(schema->arguments[2].default_value, Attr(std::vector<int64_t>{}));
  EXPECT_EQ(schema->arguments[3].kind, ArgKind::kBoolArray3);
  EXPECT_EQ(schema->arguments[3].default_value, Attr(std::vector<bool>{true, false, true}));
  EXPECT_EQ(schema->arguments[4].default_value, Attr(std::string("a, \"b")));
  EXPECT_EQ(schema->arguments[5].default_value, Attr(MemoryFormat::kContiguous));
  EXPECT_EQ(schema->arguments[6].default_value, Attr(MemoryFormat::kContiguous));
  EXPECT_EQ(schema->arguments[7].default_value, Attr(DType::kFloat32));
  EXPECT_EQ(schema->arguments[8].default_value, Attr(2.0));
  EXPECT_TRUE(schema->returns.empty());
}

TEST(SchemaTest, MarksReturnsThatAreNoTensors) {
  const auto schema = ParseSchema("aten::item(Tensor self) -> Scalar");
  ASSERT_TRUE(schema.ok());
  EXPECT_TRUE(schema->returns_non_tensor);
}

TEST(SchemaTest, RefusesTypesWithoutAKind) {
  EXPECT_EQ(ParseSchema("aten::cat.names(Tensor[] tensors, Dimname dim) -> Tensor").status().code(),
            absl::StatusCode::kUnimplemented);
  EXPECT_EQ(ParseSchema("not a schema").status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(ParseSchema("a::b(Tensor) -> Tensor").status().code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace cuvil::cir
