#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "jit/cir/graph.h"

namespace cuvil::trace {

// Where an operator was called: the innermost frame, and the innermost frame outside of torch itself.
struct SourceLocation {
  std::string file;
  int line = 0;
  std::string function;
  int instruction = 0;  // byte offset in the function's bytecode
  std::string user_file;
  int user_line = 0;
  std::string user_function;
  std::string module;  // the module whose call it was in, as a path below the traced one; empty: that one itself
};

// What a conditional jump asks.
enum class BranchKind : uint8_t {
  kTruth,  // whether a value is true
  kNone,   // whether a value is None
  kLoop,   // whether an iterator has another item
};

// How often the answer at one conditional jump was yes and no, over one trace.
struct BranchCount {
  std::string file;
  int line = 0;
  int column = 0;       // from 1; 0: not known
  int instruction = 0;  // byte offset in the function's bytecode
  BranchKind kind = BranchKind::kTruth;
  uint32_t num_true = 0;
  uint32_t num_false = 0;
};

// One Python function entered during the trace.
struct FrameCount {
  std::string file;
  int line = 0;
  std::string function;
  uint32_t num_entered = 0;
};

// A Python-free record of one traced call: its tensor program with a source line for every operator (cir::Op's
// `source` indexes `sources`, as it does the graph's own), and the functions that it entered.
//
// Threads: plain data; immutable once the capture is built.
struct Trace {
  cir::Graph graph;
  std::vector<SourceLocation> sources;
  std::vector<FrameCount> frames;
};

}  // namespace cuvil::trace
