#include "scheduler/cupti_reader.h"

#include <gtest/gtest.h>

#include "tests/testing/fake_cupti.h"

namespace cuvil::scheduler {
namespace {

using Fake = testing::FakeCupti;

class CuptiReaderTest : public ::testing::Test {
 protected:
  CuptiActivities Read(const std::vector<Fake::Record>& records, size_t missing_bytes = 0) {
    std::vector<uint64_t> aligned(1024);
    auto* buffer = reinterpret_cast<uint8_t*>(aligned.data());
    size_t used = 0;
    for (const Fake::Record& record : records) {
      std::memcpy(buffer + used, record.bytes.data(), record.bytes.size());
      used += record.bytes.size();
    }
    const CuptiBufferView view(buffer, used - missing_bytes);
    return ReadCuptiBuffers(api_, absl::MakeConstSpan(&view, 1));
  }

  Fake fake_;
  const CuptiApi api_ = Fake::Api();
};

TEST_F(CuptiReaderTest, AKernelHasItsNameShapeTimesAndNode) {
  const CuptiActivities all = Read({Fake::Kernel("_Z4gemmILi4EEvPf", 100, 140, 9, 77)});
  ASSERT_EQ(all.activities.size(), 1u);
  const CuptiActivity& kernel = all.activities[0];
  EXPECT_EQ(kernel.kind, DeviceActivityKind::kKernel);
  EXPECT_EQ(all.names[kernel.name], "void gemm<4>(float*)");
  EXPECT_EQ(kernel.start, 100u);
  EXPECT_EQ(kernel.end, 140u);
  EXPECT_EQ(kernel.correlation, 9u);
  EXPECT_EQ(kernel.graph_node, 77u);
  EXPECT_EQ(kernel.device, 1u);
  EXPECT_EQ(kernel.stream, 7u);
  EXPECT_EQ(kernel.grid, (std::array<uint32_t, 3>{1, 2, 3}));
  EXPECT_EQ(kernel.block, (std::array<uint32_t, 3>{32, 64, 96}));
}

TEST_F(CuptiReaderTest, CopiesAndFillsHaveTheirBytes) {
  Fake::Record fill(Fake::kMemset);
  fill.Put(8, uint64_t{64}).Put(16, uint64_t{5}).Put(24, uint64_t{6}).Put(44, uint32_t{3}).Put(64, uint64_t{12});
  Fake::Record peer(Fake::kPeer);
  peer.Put(4, uint8_t{10}).Put(8, uint64_t{32}).Put(16, uint64_t{7}).Put(60, uint32_t{4}).Put(72, uint64_t{13});
  const CuptiActivities all = Read({Fake::Copy(1, 4096, 1, 2, 2), fill, peer, Fake::Copy(200, 1, 1, 2, 2)});
  ASSERT_EQ(all.activities.size(), 4u);
  EXPECT_EQ(all.names[all.activities[0].name], "copy host to device");
  EXPECT_EQ(all.activities[0].bytes, 4096u);
  EXPECT_EQ(all.activities[0].kind, DeviceActivityKind::kCopy);
  EXPECT_EQ(all.names[all.activities[1].name], "fill");
  EXPECT_EQ(all.activities[1].kind, DeviceActivityKind::kFill);
  EXPECT_EQ(all.activities[1].correlation, 3u);
  EXPECT_EQ(all.activities[1].graph_node, 12u);
  EXPECT_EQ(all.names[all.activities[2].name], "copy between devices");
  EXPECT_EQ(all.activities[2].correlation, 4u);
  EXPECT_EQ(all.activities[2].graph_node, 13u);
  EXPECT_EQ(all.names[all.activities[3].name], "copy");  // a kind that is not known
}

TEST_F(CuptiReaderTest, OnlyOurOwnNumbersCount) {
  const CuptiActivities all = Read({Fake::External(3, 111, 9), Fake::External(5, 222, 9), Fake::External(4, 333, 9)});
  ASSERT_EQ(all.external_ids.size(), 1u);
  EXPECT_EQ(all.external_ids.at(9), 222u);
}

TEST_F(CuptiReaderTest, KernelsOfOneNameShareIt) {
  const std::string copy = "plain";
  const CuptiActivities all =
      Read({Fake::Kernel("plain", 1, 2, 1), Fake::Kernel(copy.c_str(), 2, 3, 2), Fake::Kernel(nullptr, 3, 4, 3)});
  ASSERT_EQ(all.activities.size(), 3u);
  EXPECT_EQ(all.activities[0].name, all.activities[1].name);
  EXPECT_EQ(all.names, (std::vector<std::string>{"plain", "(unnamed kernel)"}));
}

TEST_F(CuptiReaderTest, RecordsOfCallsAreSkipped) {
  const CuptiActivities all = Read({Fake::Record(Fake::kRuntime), Fake::Kernel("k", 1, 2, 1)});
  EXPECT_EQ(all.activities.size(), 1u);
  EXPECT_EQ(all.num_unreadable, 0u);
}

TEST_F(CuptiReaderTest, ABufferThatIsCutOffGivesWhatIsWholeAndIsCounted) {
  const CuptiActivities all = Read({Fake::Kernel("k", 1, 2, 1), Fake::Kernel("k", 3, 4, 2)}, 10);
  EXPECT_EQ(all.activities.size(), 1u);
  EXPECT_EQ(all.num_unreadable, 1u);
}

TEST_F(CuptiReaderTest, AnEmptyBufferIsNothing) {
  const CuptiActivities all = Read({});
  EXPECT_TRUE(all.activities.empty());
  EXPECT_EQ(all.num_unreadable, 0u);
}

}  // namespace
}  // namespace cuvil::scheduler
