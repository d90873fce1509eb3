#include "agent/lifecycle/log.h"

#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <functional>
#include <string>

#include "absl/strings/str_cat.h"

namespace cuvil::agent {
namespace {

constexpr int kLinesPerSecond = 50;

constinit std::atomic<LogLevel> threshold{LogLevel::kWarning};

// Hashes of the keys that were logged, one per slot. Two keys that share a slot may both be logged again, which is
// better than a lock that a fork could leave behind.
constinit std::array<std::atomic<uint64_t>, 1024> seen{};

constinit std::atomic<int64_t> window_second{0};
constinit std::atomic<int> window_lines{0};
constinit std::atomic<int> swallowed{0};

bool FirstTime(std::string_view key) {
  const uint64_t hash = std::hash<std::string_view>()(key) | 1;
  return seen[(hash >> 1) % seen.size()].exchange(hash, std::memory_order_relaxed) != hash;
}

bool WithinBudget() {
  const int64_t second =
      std::chrono::duration_cast<std::chrono::seconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
  if (window_second.exchange(second, std::memory_order_relaxed) != second) {
    window_lines.store(0, std::memory_order_relaxed);
  }
  return window_lines.fetch_add(1, std::memory_order_relaxed) < kLinesPerSecond;
}

void WriteLine(std::string_view message) {
  std::string line = absl::StrCat("cuvil: ", std::string(message));
  for (char& c : line) {
    if (c == '\n') c = ' ';
  }
  line.push_back('\n');
  const char* data = line.data();
  size_t left = line.size();
  while (left != 0) {
    const ssize_t written = write(STDERR_FILENO, data, left);
    if (written < 0) {
      if (errno == EINTR) continue;
      return;  // Nobody listens; there is no better place to say so.
    }
    data += written;
    left -= static_cast<size_t>(written);
  }
}

}  // namespace

void SetLogLevel(LogLevel level) { threshold.store(level, std::memory_order_relaxed); }

bool LogEnabled(LogLevel level) { return level <= threshold.load(std::memory_order_relaxed); }

void Log(LogLevel level, std::string_view once_key, std::string_view message) {
  if (!LogEnabled(level)) return;
  if (!once_key.empty() && !FirstTime(once_key)) return;
  if (level != LogLevel::kDebug) {
    if (!WithinBudget()) {
      swallowed.fetch_add(1, std::memory_order_relaxed);
      return;
    }
    if (const int missing = swallowed.exchange(0, std::memory_order_relaxed); missing != 0) {
      WriteLine(absl::StrCat(missing, " lines were left out"));
    }
  }
  WriteLine(message);
}

void ResetLog() {
  for (auto& slot : seen) slot.store(0, std::memory_order_relaxed);
  window_lines.store(0, std::memory_order_relaxed);
  swallowed.store(0, std::memory_order_relaxed);
}

}  // namespace cuvil::agent
