#include "agent/lifecycle/settings.h"

#include <gtest/gtest.h>

#include <map>
#include <string>

namespace cuvil::agent {
namespace {

std::map<std::string, std::string>& Environment() {
  static auto& environment = *new std::map<std::string, std::string>;
  return environment;
}

Settings Read(std::map<std::string, std::string> environment) {
  Environment() = std::move(environment);
  return Settings::From([](const char* name) -> const char* {
    const auto it = Environment().find(name);
    return it == Environment().end() ? nullptr : it->second.c_str();
  });
}

TEST(SettingsTest, DefaultsWithoutVariables) {
  const Settings settings = Read({});
  EXPECT_EQ(settings.prepare, PrepareMode::kBackground);
  EXPECT_EQ(settings.adopt, AdoptMode::kMeasure);
  EXPECT_EQ(settings.log_level, LogLevel::kWarning);
  EXPECT_FALSE(settings.disabled);
  EXPECT_EQ(settings.max_plans, 16u);
  EXPECT_EQ(settings.max_streams, 4u);
  EXPECT_TRUE(settings.problems.empty());
}

TEST(SettingsTest, ReadsEveryVariable) {
  const Settings settings = Read({{"CUVIL_PREPARE", "sync"},
                                  {"CUVIL_ADOPT", "always"},
                                  {"CUVIL_LOG", "debug"},
                                  {"CUVIL_DISABLE", "1"},
                                  {"CUVIL_PLANS", "3"},
                                  {"CUVIL_STREAMS", "1"},
                                  {"CUVIL_FAULT", "run:1"}});
  EXPECT_EQ(settings.prepare, PrepareMode::kSync);
  EXPECT_EQ(settings.adopt, AdoptMode::kAlways);
  EXPECT_EQ(settings.log_level, LogLevel::kDebug);
  EXPECT_TRUE(settings.disabled);
  EXPECT_EQ(settings.max_plans, 3u);
  EXPECT_EQ(settings.max_streams, 1u);
  EXPECT_EQ(settings.faults, "run:1");
  EXPECT_TRUE(settings.problems.empty());
}

TEST(SettingsTest, IgnoresNonsenseWithASentenceEach) {
  const Settings settings = Read({{"CUVIL_PREPARE", "Sync"},
                                  {"CUVIL_ADOPT", "never"},
                                  {"CUVIL_LOG", "all"},
                                  {"CUVIL_PLANS", "0"},
                                  {"CUVIL_STREAMS", "two"}});
  EXPECT_EQ(settings.prepare, PrepareMode::kBackground);
  EXPECT_EQ(settings.max_plans, 16u);
  EXPECT_EQ(settings.max_streams, 4u);
  ASSERT_EQ(settings.problems.size(), 5u);
  EXPECT_EQ(settings.problems[3], "CUVIL_PLANS=0 is ignored: expected a number from 1 to 4096");
  EXPECT_EQ(settings.problems[4], "CUVIL_STREAMS=two is ignored: expected a number from 1 to 8");
}

TEST(SettingsTest, GraphMemoryIsBytesOrAShareOfTheDevice) {
  constexpr uint64_t kTotal = uint64_t{80} << 30;
  EXPECT_EQ(Read({}).graph_memory.LimitBytes(kTotal), uint64_t{10} << 30);
  const std::map<std::string, uint64_t> values = {
      {"0", 0},
      {"4096", 4096},
      {"512M", uint64_t{512} << 20},
      {"2G", uint64_t{2} << 30},
      {"1K", 1024},
      {"0.5", kTotal / 2},
      {"1.0", kTotal},
      {"0.0", 0},
  };
  for (const auto& [text, bytes] : values) {
    const Settings settings = Read({{"CUVIL_GRAPH_MEMORY", text}});
    EXPECT_EQ(settings.graph_memory.LimitBytes(kTotal), bytes) << text;
    EXPECT_TRUE(settings.problems.empty()) << text;
  }
  for (const char* text : {"1.5", "-1", "2T", "5 M", "lots", "0.5x", "99999999999999999999", "99999999999G", "nan."}) {
    const Settings settings = Read({{"CUVIL_GRAPH_MEMORY", text}});
    EXPECT_EQ(settings.graph_memory.LimitBytes(kTotal), kTotal / 8) << text;
    ASSERT_EQ(settings.problems.size(), 1u) << text;
  }
}

TEST(SettingsTest, ZeroAndEmptyDoNotDisable) {
  EXPECT_FALSE(Read({{"CUVIL_DISABLE", "0"}}).disabled);
  EXPECT_FALSE(Read({{"CUVIL_DISABLE", ""}}).disabled);
}

}  // namespace
}  // namespace cuvil::agent
