#include "scheduler/profile_recorder.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "scheduler/monotonic_clock.h"

namespace cuvil::scheduler {
namespace {

ProfileSite Step(const std::string& op, int line) {
  return {ProfileKind::kStep, "Net.fc", "", "model.py", line, "forward", op};
}

TEST(ProfileRecorderTest, HandsOverIntervalsWithTheirSites) {
  ProfileRecorder recorder;
  EXPECT_EQ(recorder.FindTrack(), nullptr);
  ProfileTrack* track = recorder.AddTrack(7, "MainThread");
  EXPECT_EQ(recorder.FindTrack(), track);
  EXPECT_EQ(recorder.AddTrack(8, "another name"), track);
  const uint64_t site = recorder.AddSite(Step("aten::relu", 3));
  track->Add({10, 20, site});
  track->Add({20, 25, site});
  const Profile profile = recorder.Close();
  ASSERT_EQ(profile.sites.size(), 1u);
  EXPECT_EQ(profile.sites[0], Step("aten::relu", 3));
  ASSERT_EQ(profile.tracks.size(), 1u);
  EXPECT_EQ(profile.tracks[0].name, "MainThread");
  EXPECT_EQ(profile.tracks[0].id, 7u);
  ASSERT_EQ(profile.tracks[0].records.size(), 2u);
  EXPECT_EQ(profile.tracks[0].records[1].start_ns, 20u);
  EXPECT_EQ(profile.tracks[0].records[1].end_ns, 25u);
  EXPECT_EQ(profile.num_dropped, 0u);
  EXPECT_LE(profile.start_ns, profile.end_ns);
}

TEST(ProfileRecorderTest, EqualSitesShareOneNumber) {
  ProfileRecorder recorder;
  const uint64_t first = recorder.AddSite(Step("aten::relu", 3));
  EXPECT_EQ(recorder.AddSite(Step("aten::relu", 3)), first);
  EXPECT_NE(recorder.AddSite(Step("aten::relu", 4)), first);
  EXPECT_NE(recorder.AddSite(Step("aten::add", 3)), first);
}

TEST(ProfileRecorderTest, GroupsOfSitesAreMadeOnceForEachPlanAndModule) {
  ProfileRecorder recorder;
  int made = 0;
  const auto make = [&made] {
    ++made;
    return std::vector<ProfileSite>{Step("aten::relu", 3), Step("aten::relu", 3)};
  };
  const uint64_t first = recorder.AddSites(1, "Net", make);
  EXPECT_EQ(recorder.AddSites(1, "Net", make), first);
  EXPECT_EQ(made, 1);
  EXPECT_EQ(recorder.AddSites(1, "Other", make), first + 2);
  EXPECT_EQ(recorder.AddSites(2, "Net", make), first + 4);
  EXPECT_EQ(recorder.Close().sites.size(), 6u);
}

TEST(ProfileRecorderTest, WhatFindsNoRoomIsCounted) {
  ProfileRecorder recorder({.max_records = 5, .max_sites = 2});
  ProfileTrack* track = recorder.AddTrack(1, "");
  const uint64_t site = recorder.AddSite(Step("a", 1));
  for (uint64_t i = 0; i < 8; ++i) track->Add({i, i + 1, site});
  EXPECT_EQ(recorder.AddSites(1, "", [] { return std::vector<ProfileSite>(2); }), ProfileRecorder::kNoSite);
  recorder.AddSite(Step("b", 1));
  EXPECT_EQ(recorder.AddSite(Step("c", 1)), ProfileRecorder::kNoSite);
  track->Add({8, 9, ProfileRecorder::kNoSite});
  const Profile profile = recorder.Close();
  EXPECT_EQ(profile.sites.size(), 2u);
  ASSERT_EQ(profile.tracks[0].records.size(), 5u);
  EXPECT_EQ(profile.tracks[0].records[4].start_ns, 4u);
  EXPECT_EQ(profile.num_dropped, 4u);
}

TEST(ProfileRecorderTest, KeepsEveryIntervalOverManyChunks) {
  ProfileRecorder recorder;
  ProfileTrack* track = recorder.AddTrack(1, "");
  const uint64_t site = recorder.AddSite(Step("a", 1));
  for (uint64_t i = 0; i < 3000; ++i) track->Add({i, i + 1, site});
  const Profile profile = recorder.Close();
  ASSERT_EQ(profile.tracks[0].records.size(), 3000u);
  for (uint64_t i = 0; i < 3000; ++i) ASSERT_EQ(profile.tracks[0].records[i].start_ns, i);
}

TEST(ProfileRecorderTest, WhatComesAfterTheEndIsIgnored) {
  ProfileRecorder recorder;
  ProfileTrack* track = recorder.AddTrack(1, "");
  const uint64_t site = recorder.AddSite(Step("a", 1));
  EXPECT_TRUE(recorder.Close().tracks[0].records.empty());
  track->Add({1, 2, site});
  EXPECT_TRUE(recorder.Close().tracks[0].records.empty());
}

TEST(ProfileRecorderTest, ThreadsHaveTracksOfTheirOwnAndMayOutliveTheProfile) {
  ProfileRecorder recorder;
  std::atomic<int> ready{0};
  std::atomic<bool> stop{false};
  std::vector<std::thread> threads;
  for (int t = 0; t < 8; ++t) {
    threads.emplace_back([&, t] {
      ProfileTrack* track = recorder.AddTrack(t, std::to_string(t));
      const uint64_t site = recorder.AddSite(Step("a", t));
      for (uint64_t i = 0; i < 2000; ++i) track->Add({i, i + 1, site});
      ++ready;
      while (ready < 8) std::this_thread::yield();  // they share the room that the next line uses up
      while (!stop) track->Add({1, 2, site});
    });
  }
  while (ready < 8) std::this_thread::yield();
  const Profile profile = recorder.Close();
  stop = true;
  for (std::thread& thread : threads) thread.join();
  ASSERT_EQ(profile.tracks.size(), 8u);
  for (const Profile::Track& track : profile.tracks) {
    EXPECT_EQ(track.name, std::to_string(track.id));
    EXPECT_GE(track.records.size(), 2000u);
    for (const ProfileRecord& record : track.records) {
      EXPECT_EQ(static_cast<uint64_t>(profile.sites[record.site].line), track.id);
    }
  }
}

TEST(ProfileRecorderTest, TheClockGoesForward) {
  const uint64_t before = MonotonicNs();
  EXPECT_GE(MonotonicNs(), before);
}

}  // namespace
}  // namespace cuvil::scheduler
