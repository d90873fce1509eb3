#include "agent/lifecycle/signature_book.h"

#include <gtest/gtest.h>

#include <random>
#include <set>

namespace cuvil::agent {
namespace {

using Mode = SignatureBook::Mode;
using Options = SignatureBook::Options;

TEST(SignatureBookTest, TracesAtTheSecondSighting) {
  SignatureBook book(Options::Background());
  EXPECT_FALSE(book.ShouldTrace(1));
  EXPECT_TRUE(book.ShouldTrace(1));
}

TEST(SignatureBookTest, TracesAtTheFirstSightingInSyncMode) {
  SignatureBook book(Options::Sync());
  EXPECT_TRUE(book.ShouldTrace(1));
}

TEST(SignatureBookTest, AStreamOfNewSignaturesIsNeverTraced) {
  SignatureBook book(Options::Background());
  for (uint64_t hash = 1; hash <= 100'000; ++hash) ASSERT_FALSE(book.ShouldTrace(hash * 0x9E3779B97F4A7C15));
}

TEST(SignatureBookTest, RandomLengthsAreHardlyEverTraced) {
  SignatureBook book(Options::Background());
  std::mt19937 random(7);
  int num_traces = 0;
  for (int i = 0; i < 200; ++i) {
    const uint64_t hash = 1 + random() % 153;
    if (book.ShouldTrace(hash)) {
      ++num_traces;
      book.Captured(hash);
    }
  }
  EXPECT_LE(num_traces, 2);
}

TEST(SignatureBookTest, AFewShapesInTurnAreAllTraced) {
  SignatureBook book(Options::Background());
  std::set<uint64_t> planned;
  for (uint64_t i = 0; i < 16; ++i) {
    const uint64_t hash = 1 + i % 4;
    if (planned.count(hash) != 0) {
      book.Served(hash);
    } else if (book.ShouldTrace(hash)) {
      book.Captured(hash);
      planned.insert(hash);
    }
  }
  EXPECT_EQ(planned.size(), 4u);
}

TEST(SignatureBookTest, AShapeThatStaysAfterManyNewOnesIsTracedSoon) {
  SignatureBook book(Options::Background());
  for (uint64_t hash = 1; hash <= 100; ++hash) ASSERT_FALSE(book.ShouldTrace(hash));
  int calls = 1;
  while (!book.ShouldTrace(1'000)) ++calls;
  EXPECT_LE(calls, 12);
}

TEST(SignatureBookTest, SignaturesThatChangeAfterEachTraceAreTracedLessAndLess) {
  SignatureBook book(Options::Background());
  int num_traces = 0;
  for (uint64_t hash = 1; hash <= 5'000; ++hash) {
    for (int i = 0; i < 2; ++i) {
      if (book.ShouldTrace(hash)) {
        ++num_traces;
        book.Captured(hash);
      }
    }
  }
  EXPECT_LT(num_traces, 10);
}

TEST(SignatureBookTest, AStateThatChangesAtEveryCallIsTracedLessAndLess) {
  SignatureBook book(Options::Background());
  int num_traces = 0;
  for (int i = 0; i < 20'000; ++i) {
    if (book.ShouldTrace(1)) {
      ++num_traces;
      book.Captured(1);
    }
  }
  EXPECT_LT(num_traces, 16);
}

TEST(SignatureBookTest, APlanThatServesClearsTheBackOff) {
  SignatureBook book(Options::Background());
  for (int i = 0; i < 100; ++i) {
    if (book.ShouldTrace(1)) book.Captured(1);
  }
  EXPECT_FALSE(book.ShouldTrace(1));
  book.Served(1);
  EXPECT_TRUE(book.ShouldTrace(1));
  EXPECT_TRUE(book.in_use());
}

TEST(SignatureBookTest, AlternatingStatesOfOneSignatureAreBothTraced) {
  SignatureBook book(Options::Background());
  EXPECT_FALSE(book.ShouldTrace(1));
  ASSERT_TRUE(book.ShouldTrace(1));
  book.Captured(1);
  book.Served(1);
  EXPECT_FALSE(book.ShouldTrace(1));  // the other state
  book.Served(1);
  EXPECT_TRUE(book.ShouldTrace(1));  // the other state again
}

TEST(SignatureBookTest, ARefusedModuleIsSkippedForTwiceAsManyCallsEachTime) {
  SignatureBook book(Options::Background());
  int num_traces = 0;
  int num_hashed = 0;
  for (int i = 0; i < 100'000; ++i) {
    if (book.Skip(Mode::kInference)) continue;
    ++num_hashed;
    if (book.ShouldTrace(1)) {
      ++num_traces;
      book.Refused(1, Mode::kInference, false);
    }
  }
  EXPECT_LE(num_traces, 14);
  EXPECT_GE(num_traces, 10);
  EXPECT_LE(num_hashed, 30);
}

TEST(SignatureBookTest, ARefusalUnderGradModeLeavesInferenceAlone) {
  SignatureBook book(Options::Sync());
  ASSERT_TRUE(book.ShouldTrace(1));
  book.Refused(1, Mode::kGrad, false);
  EXPECT_TRUE(book.Skip(Mode::kGrad));
  EXPECT_FALSE(book.Skip(Mode::kInference));
  EXPECT_FALSE(book.IsRefused(2, Mode::kInference));
  EXPECT_TRUE(book.IsRefused(2, Mode::kGrad));
}

TEST(SignatureBookTest, ARefusalThatSettlesIsTriedAtTheNextCallButNotForever) {
  SignatureBook book(Options::Background());
  EXPECT_FALSE(book.ShouldTrace(1));
  int num_traces = 0;
  for (int i = 0; i < 4; ++i) {
    ASSERT_FALSE(book.Skip(Mode::kInference));
    ASSERT_TRUE(book.ShouldTrace(1)) << i;
    ++num_traces;
    book.Refused(1, Mode::kInference, true);
  }
  EXPECT_EQ(num_traces, 4) << "at the fourth sighting at the latest";
  EXPECT_TRUE(book.Skip(Mode::kInference));
}

TEST(SignatureBookTest, ARefusedSignatureDoesNotSlowDownAModuleWithAPlanInUse) {
  SignatureBook book(Options::Sync());
  ASSERT_TRUE(book.ShouldTrace(1));
  book.Captured(1);
  book.Served(1);
  ASSERT_TRUE(book.ShouldTrace(2));
  book.Refused(2, Mode::kInference, false);
  EXPECT_FALSE(book.Skip(Mode::kInference));
  EXPECT_TRUE(book.IsRefused(2, Mode::kInference));
  EXPECT_FALSE(book.IsRefused(1, Mode::kInference));
  for (int i = 0; i < 3; ++i) EXPECT_FALSE(book.ShouldTrace(2));
  EXPECT_TRUE(book.ShouldTrace(2));
}

TEST(SignatureBookTest, ABannedSignatureIsNeverTracedAgain) {
  SignatureBook book(Options::Sync());
  ASSERT_TRUE(book.ShouldTrace(1));
  book.Ban(1);
  for (int i = 0; i < 1'000; ++i) ASSERT_FALSE(book.ShouldTrace(1));
  EXPECT_TRUE(book.ShouldTrace(2));
  EXPECT_TRUE(book.IsRefused(1, Mode::kInference));
}

TEST(SignatureBookTest, AModuleWithManyBannedSignaturesIsBannedAsAWhole) {
  SignatureBook book(Options::Sync());
  for (uint64_t hash = 1; hash <= 17; ++hash) book.Ban(hash);
  EXPECT_FALSE(book.ShouldTrace(1'000));
}

}  // namespace
}  // namespace cuvil::agent
