#include "agent/trace/branch_book.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace cuvil::trace {
namespace {

BranchCount Count(int line, int column, int instruction, uint32_t num_true, uint32_t num_false,
                  BranchKind kind = BranchKind::kTruth, const char* file = "m.py") {
  return {file, line, column, instruction, kind, num_true, num_false};
}

TEST(BranchBookTest, AddsUpOverTraces) {
  BranchBook book;
  book.Add({Count(3, 5, 20, 1, 0), Count(7, 5, 40, 2, 1)});
  book.Add({Count(3, 5, 20, 0, 4)});
  const std::vector<BranchBook::Total> totals = book.Totals();
  ASSERT_EQ(totals.size(), 2u);
  EXPECT_EQ(*totals[0].file, "m.py");
  EXPECT_EQ(totals[0].line, 3);
  EXPECT_EQ(totals[0].num_true, 1u);
  EXPECT_EQ(totals[0].num_false, 4u);
  EXPECT_EQ(totals[1].num_true, 2u);
  EXPECT_EQ(totals[1].num_false, 1u);
  EXPECT_EQ(book.num_dropped(), 0u);
}

TEST(BranchBookTest, TellsBranchesOfOneLineApart) {
  BranchBook book;
  book.Add({Count(3, 5, 20, 1, 0), Count(3, 5, 30, 1, 0)});                                     // by instruction
  book.Add({Count(3, 9, 20, 1, 0)});                                                            // by column
  book.Add({Count(3, 5, 20, 1, 0, BranchKind::kLoop), Count(3, 5, 20, 1, 0, {}, "other.py")});  // kind, file
  EXPECT_EQ(book.Totals().size(), 5u);
  for (const BranchBook::Total& total : book.Totals()) EXPECT_EQ(total.num_true, 1u);
}

TEST(BranchBookTest, SortsByPlace) {
  BranchBook book;
  book.Add({Count(9, 1, 2, 1, 0, {}, "b.py"), Count(9, 1, 2, 1, 0, {}, "a.py"), Count(3, 1, 2, 1, 0, {}, "b.py")});
  std::vector<std::string> places;
  for (const BranchBook::Total& total : book.Totals()) places.push_back(*total.file + std::to_string(total.line));
  EXPECT_EQ(places, (std::vector<std::string>{"a.py9", "b.py3", "b.py9"}));
}

TEST(BranchBookTest, IsBoundedAndCountsWhatItDrops) {
  BranchBook book(2);
  book.Add({Count(1, 0, 0, 1, 1), Count(2, 0, 0, 1, 1), Count(3, 0, 0, 2, 3), Count(1, 0, 0, 1, 0)});
  EXPECT_EQ(book.Totals().size(), 2u);
  EXPECT_EQ(book.num_dropped(), 5u);
  EXPECT_EQ(book.Totals()[0].num_true, 2u);  // what is known goes on being counted
  book.Add({Count(4, 0, 0, 1, 0, {}, "new.py")});
  EXPECT_EQ(book.Totals().size(), 2u);
  EXPECT_EQ(book.num_dropped(), 6u);
}

}  // namespace
}  // namespace cuvil::trace
