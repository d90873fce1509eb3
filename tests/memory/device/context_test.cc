#include "memory/device/context.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/testing/fake_driver.h"

namespace cuvil::device {
namespace {

using testing::FakeDriver;

class ContextTest : public ::testing::Test {
 protected:
  FakeDriver fake_;
  const DriverApi api_ = FakeDriver::Api();
};

TEST_F(ContextTest, APrimaryContextIsRetained) {
  const auto context = RetainPrimaryContext(api_, 1);
  ASSERT_TRUE(context.ok()) << context.status();
  EXPECT_EQ(*context, reinterpret_cast<void*>(501));
  fake_.failing = "cuDevicePrimaryCtxRetain";
  EXPECT_EQ(RetainPrimaryContext(api_, 0).status().code(), absl::StatusCode::kUnavailable);
  DriverApi old = api_;
  old.cuCtxPushCurrent_v2 = nullptr;
  EXPECT_EQ(RetainPrimaryContext(old, 0).status().code(), absl::StatusCode::kUnavailable);
}

TEST_F(ContextTest, AScopeChangesNothingThatIsRight) {
  void* const ours = reinterpret_cast<void*>(500);
  void* const other = reinterpret_cast<void*>(501);
  {
    const ContextScope scope(api_, ours);
    EXPECT_EQ(fake_.contexts, (std::vector<void*>{ours}));
    const ContextScope again(api_, ours);
    EXPECT_EQ(fake_.contexts.size(), 1u);
    const ContextScope none(api_, nullptr);
    EXPECT_EQ(fake_.contexts.size(), 1u);
    const ContextScope inner(api_, other);
    EXPECT_EQ(fake_.contexts.back(), other);
  }
  EXPECT_TRUE(fake_.contexts.empty());
  fake_.failing = "cuCtxPushCurrent";
  fake_.contexts = {other};
  { const ContextScope scope(api_, ours); }
  EXPECT_EQ(fake_.Count("cuCtxPopCurrent"), 2u);
}

}  // namespace
}  // namespace cuvil::device
