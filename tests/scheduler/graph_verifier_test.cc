#include "scheduler/graph_verifier.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

namespace cuvil::scheduler {
namespace {

using ::testing::HasSubstr;

GraphFacts::Step Step(std::vector<uint32_t> nodes, std::vector<ByteRange> reads, std::vector<ByteRange> writes,
                      uint32_t stream) {
  return {std::move(nodes), std::move(reads), std::move(writes), stream};
}

// Step 0 makes a; steps 1 and 2 read it on streams of their own and make b and c, step 2 by two nodes; step 3 reads
// both on stream 0.
constexpr ByteRange kA{1000, 1100}, kB{2000, 2100}, kC{3000, 3100}, kD{4000, 4100};

GraphFacts Diamond() {
  GraphFacts facts;
  facts.num_nodes = 5;
  facts.edges = {{0, 1}, {0, 2}, {2, 3}, {1, 4}, {3, 4}};
  facts.steps = {Step({0}, {}, {kA}, 0), Step({1}, {kA}, {kB}, 0), Step({2, 3}, {kA}, {kC}, 1),
                 Step({4}, {kB, kC}, {kD}, 0)};
  return facts;
}

std::string Failure(const GraphFacts& facts) {
  const absl::Status status = VerifyGraph(facts);
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
  return std::string(status.message());
}

TEST(GraphVerifierTest, AcceptsWhatIsOrdered) {
  EXPECT_TRUE(VerifyGraph(Diamond()).ok()) << VerifyGraph(Diamond());
  EXPECT_TRUE(VerifyGraph({}).ok());
}

TEST(GraphVerifierTest, Trap20FindsEachMissingEdge) {
  for (size_t k = 0; k < Diamond().edges.size(); ++k) {
    GraphFacts facts = Diamond();
    facts.edges.erase(facts.edges.begin() + static_cast<ptrdiff_t>(k));
    EXPECT_FALSE(VerifyGraph(facts).ok()) << k;
  }
}

TEST(GraphVerifierTest, FindsOneNodeOfAStepThatIsNotOrdered) {
  GraphFacts facts = Diamond();
  // The second node of step 2 is reached, the first is not.
  facts.edges = {{0, 1}, {0, 3}, {2, 3}, {1, 4}, {3, 4}};
  EXPECT_THAT(Failure(facts), HasSubstr("steps 0 and 2"));
}

TEST(GraphVerifierTest, Trap20FindsBranchesThatShareBytes) {
  GraphFacts facts = Diamond();
  facts.steps[2].writes = {{2050, 2060}};  // within b
  EXPECT_THAT(Failure(facts), HasSubstr("steps 1 and 2"));
  facts.steps[2].writes = {{2100, 2200}};  // right behind it
  EXPECT_TRUE(VerifyGraph(facts).ok()) << VerifyGraph(facts);
  facts.steps[2].writes = {{1900, 2300}};  // around it
  EXPECT_THAT(Failure(facts), HasSubstr("touch the same memory"));
}

TEST(GraphVerifierTest, FindsAnInPlaceOperatorBesideAReader) {
  GraphFacts facts = Diamond();
  facts.steps[2].writes = {kA};
  EXPECT_THAT(Failure(facts), HasSubstr("steps 1 and 2"));
}

TEST(GraphVerifierTest, FindsAWriteThroughAViewOfAPart) {
  GraphFacts facts = Diamond();
  facts.steps[1].reads = {{1000, 1050}};
  facts.steps[2].reads.clear();
  facts.steps[2].writes = {{1049, 1080}};
  EXPECT_THAT(Failure(facts), HasSubstr("steps 1 and 2"));
  facts.steps[2].writes = {{1050, 1080}};
  EXPECT_TRUE(VerifyGraph(facts).ok()) << VerifyGraph(facts);
}

TEST(GraphVerifierTest, ReadersOfTheSameBytesNeedNoOrder) {
  GraphFacts facts = Diamond();
  facts.steps[1].reads = facts.steps[2].reads = {kA, kA};
  EXPECT_TRUE(VerifyGraph(facts).ok()) << VerifyGraph(facts);
}

TEST(GraphVerifierTest, TheOrderMustBeTheProgramsOwn) {
  GraphFacts facts = Diamond();
  // A path, but from the reader to the maker.
  facts.edges = {{1, 0}, {0, 2}, {2, 3}, {1, 4}, {3, 4}};
  EXPECT_THAT(Failure(facts), HasSubstr("steps 0 and 1"));
}

TEST(GraphVerifierTest, StepsOfOneStreamAreInOrder) {
  GraphFacts facts = Diamond();
  facts.steps[2].stream = 0;
  EXPECT_THAT(Failure(facts), HasSubstr("run on one stream"));
}

TEST(GraphVerifierTest, MemoryGoesBackOnlyWhenItsReadersAreBehind) {
  GraphFacts facts = Diamond();
  // Between step 1 and step 3 stream 0 gets one more step, which may get what was released before it.
  facts.num_nodes = 6;
  facts.steps.insert(facts.steps.begin() + 3, Step({5}, {kB}, {{5000, 5100}}, 0));
  facts.edges = {{0, 1}, {0, 2}, {2, 3}, {1, 5}, {5, 4}, {3, 4}};
  EXPECT_TRUE(VerifyGraph(facts).ok()) << VerifyGraph(facts);
  facts.releases = {{kA, 0, 2}};
  EXPECT_THAT(Failure(facts), HasSubstr("may get the first one's memory"));
  facts.releases = {{kA, 0, 3}};
  EXPECT_TRUE(VerifyGraph(facts).ok()) << VerifyGraph(facts);
  facts.releases = {{kC, 1, 4}};  // nothing follows on its stream
  EXPECT_TRUE(VerifyGraph(facts).ok()) << VerifyGraph(facts);
}

TEST(GraphVerifierTest, RefusesWhatIsNoGraph) {
  GraphFacts facts = Diamond();
  facts.edges.emplace_back(4, 0);
  EXPECT_THAT(Failure(facts), HasSubstr("cycle"));
  facts = Diamond();
  facts.edges.emplace_back(4, 5);
  EXPECT_EQ(VerifyGraph(facts).code(), absl::StatusCode::kInvalidArgument);
  facts = Diamond();
  facts.steps[3].nodes = {};  // a node that nobody made
  EXPECT_EQ(VerifyGraph(facts).code(), absl::StatusCode::kInvalidArgument);
  facts.steps[3].nodes = {3, 4};  // a node of two steps
  EXPECT_EQ(VerifyGraph(facts).code(), absl::StatusCode::kInvalidArgument);
  facts.steps[3].nodes = {5};
  EXPECT_EQ(VerifyGraph(facts).code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace cuvil::scheduler
