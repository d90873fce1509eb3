#pragma once

#include <string_view>

#include "agent/lifecycle/settings.h"

namespace cuvil::agent {

void SetLogLevel(LogLevel level);
bool LogEnabled(LogLevel level);

// Writes "cuvil: <message>" to file descriptor 2 as one line, in one write.
//
// `once_key` not empty: further messages with the same key are dropped (one line per code object). Beyond that a
// budget of lines per second holds for everything but debug, and what it swallowed is told when it refills.
//
// sys.stderr is not used: it may be the program's own Python, which never runs on our account.
//
// Threads: any; no GIL; no locks.
void Log(LogLevel level, std::string_view once_key, std::string_view message);

// Forgets which keys were seen, and what was spent of the budget.
void ResetLog();

}  // namespace cuvil::agent
