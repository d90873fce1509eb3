#include "memory/device/numa.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace cuvil::device {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;

TEST(ParseCpuListTest, ReadsRangesAndSingles) {
  EXPECT_THAT(*ParseCpuList("0-2,5\n"), ElementsAre(0, 1, 2, 5));
  EXPECT_THAT(*ParseCpuList("7"), ElementsAre(7));
  EXPECT_THAT(*ParseCpuList(""), IsEmpty());
}

TEST(ParseCpuListTest, RejectsMalformedRanges) {
  for (const char* text : {"a", "3-1", "1-", "-1", "1,,2", "1-2-3"}) {
    EXPECT_EQ(ParseCpuList(text).status().code(), absl::StatusCode::kInvalidArgument) << text;
  }
}

TEST(ReadNumaNodesTest, ThereIsAlwaysANode) { EXPECT_FALSE(ReadNumaNodes().empty()); }

}  // namespace
}  // namespace cuvil::device
