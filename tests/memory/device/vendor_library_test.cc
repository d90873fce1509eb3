#include "memory/device/vendor_library.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "memory/device/shared_library.h"

namespace cuvil::device {
namespace {

TEST(SharedLibraryTest, FindsWhatIsLoadedAlready) {
  auto library = SharedLibrary::Open({"libabsent.so.7", "libc.so.6"});
  ASSERT_TRUE(library.ok()) << library.status();
  EXPECT_TRUE(library->was_loaded());
  EXPECT_EQ(library->soname(), "libc.so.6");
  EXPECT_THAT(library->path(), testing::HasSubstr("libc.so.6"));
  EXPECT_NE(library->Find("memcpy"), nullptr);
  EXPECT_EQ(library->Find("no_such_function"), nullptr);
}

TEST(SharedLibraryTest, AbsentLibraryIsUnavailableWithTheLoadersReason) {
  auto library = SharedLibrary::Open({"libabsent.so.7"});
  EXPECT_EQ(library.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(library.status().message()), testing::HasSubstr("libabsent.so.7"));
}

TEST(VendorLibraryTest, EveryRowSaysWhatIsThereOrWhyNot) {
  const std::vector<VendorLibrary> rows = ProbeVendorLibraries();
  ASSERT_EQ(rows.size(), 5u);
  for (const VendorLibrary& row : rows) {
    EXPECT_FALSE(row.name.empty());
    EXPECT_FALSE(row.use.empty());
    if (row.status.ok()) {
      EXPECT_FALSE(row.path.empty()) << row.name;
    } else {
      EXPECT_EQ(row.status.code(), absl::StatusCode::kUnavailable) << row.name;
    }
  }
}

}  // namespace
}  // namespace cuvil::device
