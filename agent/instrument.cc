#include "agent/instrument.h"

#include <climits>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "agent/boundary.h"
#include "agent/cpython_compat_internal.h"
#include "agent/fault_injection.h"
#include "agent/py_ref.h"

namespace cuvil::agent {
namespace {

struct ProbeObject {
  PyObject ob_base;
  CodeRecord* record;  // null once the original code is gone
};

ProbeHandler g_handler = nullptr;
Py_ssize_t g_extra_index = -1;
uint64_t g_num_copies = 0, g_num_refused = 0, g_num_mismatches = 0;

// A code object's slot holds its record, or, in a copy, the address of the copy's probe plus one.
bool IsProbe(void* extra) { return (reinterpret_cast<uintptr_t>(extra) & 1) != 0; }
ProbeObject* ToProbe(void* extra) { return reinterpret_cast<ProbeObject*>(reinterpret_cast<uintptr_t>(extra) - 1); }

struct Instruction {
  int opcode, oparg;
  int unit;         // of the instruction itself; its EXTENDED_ARG stand before it
  int next_unit;    // behind its inline cache
  int target = -1;  // index of the instruction that the jump leads to
  int depth = -1;   // -1: not reachable
  int site = -1;
  bool compares_top = false;
  int new_start = 0, new_unit = 0;  // in the copy: of its probe, of itself
  int cache_units() const { return next_unit - unit - 1; }
};

struct Handler {
  int first, end, target;  // instruction indices
  int depth;
  bool pushes_lasti;
};

struct Location {
  int end_unit;
  int line, column, end_line, end_column;  // -1: unknown
};

int NumExtendedArgs(int oparg) { return oparg > 0xFFFFFF ? 3 : oparg > 0xFFFF ? 2 : oparg > 0xFF ? 1 : 0; }

// One code object on its way to its copy.
class Rewriter {
 public:
  explicit Rewriter(PyCodeObject* code) : code_(code) {}

  // Each returns null, or the reason why the code is refused.
  const char* Parse();
  const char* ComputeDepths();
  const char* PlaceProbes(std::vector<Site>* sites);
  const char* LayOut();

  int stack_size() const { return stack_size_; }
  PyCodeObject* Emit(PyObject* probe, std::vector<int32_t>* site_at_unit);

 private:
  int num_instructions() const { return static_cast<int>(instructions_.size()); }
  int SiteOffset(int index) const;
  void DecodeLocations();
  void EmitUnit(int opcode, int oparg) {
    bytecode_.push_back(static_cast<char>(opcode));
    bytecode_.push_back(static_cast<char>(oparg));
  }
  void EmitInstruction(int opcode, int oparg, int num_extended) {
    for (int i = num_extended; i > 0; --i) EmitUnit(compat::kExtendedArg, (oparg >> (8 * i)) & 0xFF);
    EmitUnit(opcode, oparg & 0xFF);
  }
  void EmitLocation(const Location& location, int num_units, int* line);
  std::string EncodeHandlers() const;

  PyCodeObject* code_;
  std::vector<Instruction> instructions_;
  std::vector<Handler> handlers_;
  std::vector<Location> locations_;
  std::vector<int> num_extended_;
  std::string bytecode_, lines_;
  int probe_constant_ = 0;
  int total_units_ = 0;
  int stack_size_ = 0;
};

constexpr char kMalformed[] = "its bytecode is not what the compiler emits";

const char* Rewriter::Parse() {
  // Neither specialised nor instrumented by the interpreter; unknown opcodes come back as CACHE.
  OwnedRef bytes = OwnedRef::Steal(PyCode_GetCode(code_));
  if (!bytes) return "its bytecode cannot be read";
  const auto* units = reinterpret_cast<const unsigned char*>(PyBytes_AS_STRING(bytes.get()));
  const int num_units = static_cast<int>(PyBytes_GET_SIZE(bytes.get()) / 2);
  std::vector<int> index_at(num_units + 1, -1);
  for (int unit = 0; unit < num_units;) {
    const int index = num_instructions();
    index_at[unit] = index;
    unsigned oparg = 0;
    while (units[2 * unit] == compat::kExtendedArg) {
      oparg = (oparg | units[2 * unit + 1]) << 8;
      if (++unit >= num_units) return kMalformed;
    }
    index_at[unit] = index;
    Instruction instruction;
    instruction.opcode = units[2 * unit];
    instruction.oparg = static_cast<int>(oparg | units[2 * unit + 1]);
    if (instruction.opcode == compat::kCache || instruction.oparg < 0) return kMalformed;
    instruction.unit = unit;
    instruction.next_unit = unit + 1 + compat::CacheUnits(instruction.opcode);
    unit = instruction.next_unit;
    if (unit > num_units) return kMalformed;
    instructions_.push_back(instruction);
  }
  index_at[num_units] = num_instructions();
  for (Instruction& instruction : instructions_) {
    if (!compat::HasJump(instruction.opcode)) continue;
    int64_t distance = instruction.oparg;
    int64_t unit = instruction.next_unit + (compat::IsBackwardJump(instruction.opcode) ? -distance : distance);
    if (unit < 0 || unit >= num_units || index_at[unit] < 0) return kMalformed;
    instruction.target = index_at[unit];
  }

  // Objects/exception_handling_notes.txt: big-endian groups of six bits.
  const auto* at = reinterpret_cast<const unsigned char*>(PyBytes_AS_STRING(code_->co_exceptiontable));
  const auto* end = at + PyBytes_GET_SIZE(code_->co_exceptiontable);
  bool truncated = false;
  auto read = [&]() -> int {
    int value = 0, byte;
    do {
      if (at >= end) {
        truncated = true;
        return 0;
      }
      byte = *at++;
      value = (value << 6) | (byte & 63);
    } while ((byte & 64) != 0);
    return value;
  };
  while (at < end) {
    int first = read(), length = read(), target = read(), depth_and_lasti = read();
    if (truncated || first < 0 || length < 0 || first + length > num_units || target < 0 || target >= num_units) {
      return kMalformed;
    }
    Handler handler{index_at[first], index_at[first + length], index_at[target], depth_and_lasti >> 1,
                    (depth_and_lasti & 1) != 0};
    if (handler.first < 0 || handler.end < 0 || handler.target < 0) return kMalformed;
    handlers_.push_back(handler);
  }
  return nullptr;
}

const char* Rewriter::ComputeDepths() {
  static constexpr char kInconsistent[] = "the depth of its operand stack depends on the path taken";
  std::vector<int> pending;
  bool consistent = true;
  auto reach = [&](int index, int depth) {
    if (index >= num_instructions() || depth < 0 || depth > code_->co_stacksize) {
      consistent = false;
    } else if (instructions_[index].depth < 0) {
      instructions_[index].depth = depth;
      pending.push_back(index);
    } else if (instructions_[index].depth != depth) {
      consistent = false;
    }
  };
  if (instructions_.empty()) return kMalformed;
  reach(0, 0);
  for (const Handler& handler : handlers_) reach(handler.target, handler.depth + (handler.pushes_lasti ? 2 : 1));
  while (!pending.empty() && consistent) {
    const int index = pending.back();
    pending.pop_back();
    const Instruction& instruction = instructions_[index];
    if (instruction.opcode == compat::kReturnGenerator) {
      // The generator's body goes on behind it with what send() passes, which POP_TOP takes away.
      reach(index + 1, 1);
      continue;
    }
    if (instruction.target >= 0) {
      int effect = PyCompile_OpcodeStackEffectWithJump(instruction.opcode, instruction.oparg, 1);
      if (effect == PY_INVALID_STACK_EFFECT) return kMalformed;
      reach(instruction.target, instruction.depth + effect);
    }
    int effect = PyCompile_OpcodeStackEffectWithJump(instruction.opcode, instruction.oparg, 0);
    if (effect == PY_INVALID_STACK_EFFECT) return kMalformed;
    if (compat::FallsThrough(instruction.opcode)) reach(index + 1, instruction.depth + effect);
  }
  return consistent ? nullptr : kInconsistent;
}

// A call with keyword names is announced where the names are passed, as the call: nothing may stand between the two.
int Rewriter::SiteOffset(int index) const {
  if (index >= num_instructions()) return static_cast<int>(Py_SIZE(code_)) * 2;
  if (compat::IsKwNames(instructions_[index].opcode) && index + 1 < num_instructions()) ++index;
  return instructions_[index].unit * 2;
}

const char* Rewriter::PlaceProbes(std::vector<Site>* sites) {
  std::vector<bool> entered_by_jump(num_instructions(), false);
  for (const Instruction& instruction : instructions_) {
    if (instruction.target >= 0) entered_by_jump[instruction.target] = true;
  }
  for (const Handler& handler : handlers_) entered_by_jump[handler.target] = true;

  bool started = false;  // before the first RESUME the interpreter takes the frame for incomplete
  int needed_stack = 0;
  for (int i = 0; i < num_instructions(); ++i) {
    Instruction& instruction = instructions_[i];
    const int previous = i > 0 ? instructions_[i - 1].opcode : compat::kCache;
    started = started || instruction.opcode == compat::kResume;
    if (!started || instruction.depth < 0 || !compat::ProbeAllowedBetween(previous, instruction.opcode)) continue;
    if (compat::IsKwNames(previous) || compat::IsSecondHalfOfCall(previous, instruction.opcode)) {
      if (entered_by_jump[i]) return kMalformed;
      continue;
    }
    const Instruction* announced = &instruction;
    int kwnames = -1;
    if (compat::IsKwNames(instruction.opcode)) {
      if (i + 1 >= num_instructions()) return kMalformed;
      announced = &instructions_[i + 1];
      kwnames = instruction.oparg;
      if (Classify(announced->opcode, announced->oparg) != Op::kCall || kwnames >= PyTuple_GET_SIZE(code_->co_consts)) {
        return kMalformed;
      }
    }
    Site site;
    site.opcode = announced->opcode;
    site.oparg = announced->oparg;
    site.op = Classify(site.opcode, site.oparg);
    site.depth = instruction.depth;
    site.offset = announced->unit * 2;
    site.target = announced->target >= 0 ? SiteOffset(announced->target) : -1;
    site.next = SiteOffset(static_cast<int>(announced - instructions_.data()) + 1);
    site.kwnames = kwnames;
    instruction.site = static_cast<int>(sites->size());
    instruction.compares_top = instruction.depth > 0 && compat::TopIsObject(instruction.opcode);
    sites->push_back(site);
    if (instruction.depth + 2 > needed_stack) needed_stack = instruction.depth + 2;
  }
  if (!started) return kMalformed;
  stack_size_ = needed_stack > code_->co_stacksize ? needed_stack : code_->co_stacksize;
  return nullptr;
}

const char* Rewriter::LayOut() {
  probe_constant_ = static_cast<int>(PyTuple_GET_SIZE(code_->co_consts));
  const int probe_units = 3 + NumExtendedArgs(probe_constant_);
  num_extended_.reserve(instructions_.size());
  for (const Instruction& instruction : instructions_) num_extended_.push_back(NumExtendedArgs(instruction.oparg));
  // Jumps grow with what lies between, and may need more EXTENDED_ARG for that; they never shrink again.
  for (bool changed = true; changed;) {
    changed = false;
    int unit = 0;
    for (int i = 0; i < num_instructions(); ++i) {
      Instruction& instruction = instructions_[i];
      instruction.new_start = unit;
      if (instruction.site >= 0) unit += probe_units;
      unit += num_extended_[i];
      instruction.new_unit = unit;
      unit += 1 + instruction.cache_units();
    }
    total_units_ = unit;
    for (int i = 0; i < num_instructions(); ++i) {
      Instruction& instruction = instructions_[i];
      if (instruction.target < 0) continue;
      const int from = instruction.new_unit + 1 + instruction.cache_units();
      const int to = instructions_[instruction.target].new_start;
      instruction.oparg = compat::IsBackwardJump(instruction.opcode) ? from - to : to - from;
      if (instruction.oparg < 0) return kMalformed;
      if (NumExtendedArgs(instruction.oparg) > num_extended_[i]) {
        num_extended_[i] = NumExtendedArgs(instruction.oparg);
        changed = true;
      }
    }
  }
  return nullptr;
}

// Objects/locations.md. PyCode_Addr2Location starts from the beginning for every query: quadratic on large code.
void Rewriter::DecodeLocations() {
  const auto* at = reinterpret_cast<const unsigned char*>(PyBytes_AS_STRING(code_->co_linetable));
  const auto* end = at + PyBytes_GET_SIZE(code_->co_linetable);
  int line = code_->co_firstlineno, unit = 0;
  auto read_byte = [&]() -> unsigned { return at < end ? *at++ : 0; };
  auto read = [&]() -> int {
    unsigned byte = read_byte(), value = byte & 63;
    for (int shift = 6; (byte & 64) != 0 && shift < 32; shift += 6) {
      byte = read_byte();
      value |= (byte & 63) << shift;
    }
    return static_cast<int>(value);
  };
  auto read_signed = [&]() -> int {
    unsigned value = read();
    return (value & 1) != 0 ? -static_cast<int>(value >> 1) : static_cast<int>(value >> 1);
  };
  while (at < end) {
    const unsigned head = read_byte(), kind = (head >> 3) & 15;
    unit += static_cast<int>(head & 7) + 1;
    Location location{unit, -1, -1, -1, -1};
    if (kind == 14) {
      location.line = line += read_signed();
      location.end_line = line + read();
      location.column = read() - 1;
      location.end_column = read() - 1;
    } else if (kind == 13) {
      location.line = location.end_line = line += read_signed();
    } else if (kind >= 10 && kind < 13) {
      location.line = location.end_line = line += static_cast<int>(kind) - 10;
      location.column = static_cast<int>(read_byte());
      location.end_column = static_cast<int>(read_byte());
    } else if (kind < 10) {
      const unsigned byte = read_byte();
      location.line = location.end_line = line;
      location.column = static_cast<int>((kind << 3) | (byte >> 4));
      location.end_column = location.column + static_cast<int>(byte & 15);
    }
    locations_.push_back(location);
  }
}

void PutVarint(std::string* out, unsigned value) {
  for (; value >= 64; value >>= 6) out->push_back(static_cast<char>(0x40 | (value & 63)));
  out->push_back(static_cast<char>(value));
}

void PutSignedVarint(std::string* out, int value) {
  PutVarint(out, value < 0 ? (0u - static_cast<unsigned>(value)) << 1 | 1 : static_cast<unsigned>(value) << 1);
}

void Rewriter::EmitLocation(const Location& location, int num_units, int* line) {
  while (num_units > 0) {
    const int units = num_units > 8 ? 8 : num_units;
    num_units -= units;
    auto head = [&](int kind) { lines_.push_back(static_cast<char>(0x80 | (kind << 3) | (units - 1))); };
    if (location.line < 0) {
      head(15);
      continue;
    }
    const bool has_columns = location.column >= 0 && location.end_column >= 0;
    head(has_columns ? 14 : 13);
    PutSignedVarint(&lines_, location.line - *line);
    *line = location.line;
    if (has_columns) {
      PutVarint(&lines_, location.end_line - location.line);
      PutVarint(&lines_, location.column + 1);
      PutVarint(&lines_, location.end_column + 1);
    }
  }
}

std::string Rewriter::EncodeHandlers() const {
  std::string out;
  auto put = [&](int value, int first_bit) {
    for (int shift = 30; shift > 0; shift -= 6) {
      if ((value >> shift) == 0) continue;
      out.push_back(static_cast<char>(((value >> shift) & 63) | 64 | first_bit));
      first_bit = 0;
    }
    out.push_back(static_cast<char>((value & 63) | first_bit));
  };
  for (const Handler& handler : handlers_) {
    const int first = instructions_[handler.first].new_start;
    const int end = handler.end < num_instructions() ? instructions_[handler.end].new_start : total_units_;
    put(first, 128);
    put(end - first, 0);
    put(instructions_[handler.target].new_start, 0);
    put(handler.depth << 1 | (handler.pushes_lasti ? 1 : 0), 0);
  }
  return out;
}

PyCodeObject* Rewriter::Emit(PyObject* probe, std::vector<int32_t>* site_at_unit) {
  DecodeLocations();
  bytecode_.reserve(static_cast<size_t>(total_units_) * 2);
  site_at_unit->assign(total_units_, -1);
  int line = code_->co_firstlineno;
  size_t location = 0;
  for (int i = 0; i < num_instructions(); ++i) {
    const Instruction& instruction = instructions_[i];
    if (instruction.site >= 0) {
      EmitInstruction(compat::kLoadConst, probe_constant_, NumExtendedArgs(probe_constant_));
      EmitUnit(compat::kCopy, instruction.compares_top ? 2 : 1);
      (*site_at_unit)[bytecode_.size() / 2] = instruction.site;
      EmitUnit(compat::kDeleteSubscr, 0);
    }
    EmitInstruction(instruction.opcode, instruction.oparg, num_extended_[i]);
    for (int cache = 0; cache < instruction.cache_units(); ++cache) EmitUnit(compat::kCache, 0);
    while (location < locations_.size() && locations_[location].end_unit <= instruction.unit) ++location;
    EmitLocation(location < locations_.size() ? locations_[location] : Location{0, -1, -1, -1, -1},
                 static_cast<int>(bytecode_.size() / 2) - instruction.new_start, &line);
  }

  OwnedRef constants = OwnedRef::Steal(PyTuple_New(probe_constant_ + 1));
  if (!constants) {
    PyErr_Clear();
    return nullptr;
  }
  for (int i = 0; i < probe_constant_; ++i) {
    PyTuple_SET_ITEM(constants.get(), i, Py_NewRef(PyTuple_GET_ITEM(code_->co_consts, i)));
  }
  PyTuple_SET_ITEM(constants.get(), probe_constant_, Py_NewRef(probe));
  PyCodeObject* copy =
      compat::NewCode(code_, {constants.get(), std::move(bytecode_), std::move(lines_), EncodeHandlers(), stack_size_});
  if (copy == nullptr) return nullptr;
  for (const Instruction& instruction : instructions_) {
    if (compat::MustNotSpecialize(instruction.opcode)) {
      compat::ForbidSpecialization(_PyCode_CODE(copy) + instruction.new_unit);
    }
  }
  return copy;
}

}  // namespace

// What the C slots need of CodeRecord and Instrumenter.
struct ProbeAccess {
  static int Fire(PyObject* self, PyObject* key, PyObject* /*value: null, this is a deletion*/) noexcept {
    auto* probe = reinterpret_cast<ProbeObject*>(self);
    const CodeRecord* record = probe->record;
    PyThreadState* thread = PyThreadState_Get();
    if (thread != Instrumenter::probed_thread_ || record == nullptr) return 0;
    _PyInterpreterFrame* frame = compat::TopFrame(thread);
    // Another frame's code: somebody got hold of the probe and deletes an item of it.
    if (frame == nullptr || compat::FrameCode(frame) != record->copy_) return 0;
    const auto unit = static_cast<size_t>(compat::InstructionPointer(frame) - _PyCode_CODE(record->copy_));
    const int32_t index = unit < record->site_at_unit_.size() ? record->site_at_unit_[unit] : -1;
    if (index < 0) {
      ++g_num_mismatches;
      return 0;
    }
    const Site& site = record->sites_[index];
    PyObject** stack_top = frame->localsplus + record->copy_->co_nlocalsplus + site.depth;
    if (key != self && stack_top[-1] != key) {
      ++g_num_mismatches;
      return 0;
    }
    g_handler(thread, FrameView(frame, record->original_, compat::Owner(frame)), site, stack_top);
    return 0;
  }

  static void Dealloc(PyObject* self) noexcept { PyObject_Free(self); }

  // Called for the slot of every code object that is freed.
  static void Release(void* extra) noexcept {
    if (extra == nullptr || IsProbe(extra)) return;
    auto* record = static_cast<CodeRecord*>(extra);
    if (record->probe_ != nullptr) reinterpret_cast<ProbeObject*>(record->probe_)->record = nullptr;
    PyCodeObject* copy = record->copy_;
    delete record;
    Py_XDECREF(copy);
  }

  static PyMappingMethods mapping;
  static PyTypeObject type;
};

PyMappingMethods ProbeAccess::mapping = {nullptr, nullptr, ProbeAccess::Fire};
PyTypeObject ProbeAccess::type = {PyVarObject_HEAD_INIT(nullptr, 0)};

absl::Status Instrumenter::Prepare(ProbeHandler handler) {
  if (g_handler != nullptr) return absl::OkStatus();
  ErrorScope errors;
  PyTypeObject& type = ProbeAccess::type;
  type.tp_name = "cuvil.Probe";
  type.tp_basicsize = sizeof(ProbeObject);
  type.tp_dealloc = ProbeAccess::Dealloc;
  type.tp_as_mapping = &ProbeAccess::mapping;
  type.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION;
  if (PyType_Ready(&type) < 0) return absl::UnavailableError("the probe's type cannot be made ready");
  g_extra_index = compat::RequestExtraIndex(ProbeAccess::Release);
  if (g_extra_index < 0) return absl::UnavailableError("the interpreter has no room for more data in code objects");
  g_handler = handler;
  return absl::OkStatus();
}

CodeRecord* Instrumenter::FindRecord(PyCodeObject* code) noexcept {
  if (g_extra_index < 0) return nullptr;
  void* extra = compat::GetExtra(code, g_extra_index);
  return IsProbe(extra) ? ToProbe(extra)->record : static_cast<CodeRecord*>(extra);
}

bool Instrumenter::IsCopy(PyCodeObject* code) noexcept {
  return g_extra_index >= 0 && IsProbe(compat::GetExtra(code, g_extra_index));
}

CodeRecord* Instrumenter::RecordFor(PyCodeObject* code) noexcept {
  if (CodeRecord* record = FindRecord(code)) return record;
  if (g_extra_index < 0 || IsCopy(code) || FaultInjected(FaultPoint::kInstrument)) return nullptr;
  ErrorScope errors;
  // A collection here would run finalizers, Python code that nobody announces.
  const int collects = PyGC_Disable();
  CodeRecord* record = nullptr;
  // Without memory for a copy there is no record, and whoever asked does without.
  static_cast<void>(ContainStatus([&] {
    record = Make(code).release();
    return absl::OkStatus();
  }));
  if (collects != 0) PyGC_Enable();
  return record;
}

std::unique_ptr<CodeRecord> Instrumenter::Make(PyCodeObject* code) {
  auto record = std::make_unique<CodeRecord>();
  record->original_ = code;
  Rewriter rewriter(code);
  record->refusal_ = rewriter.Parse();
  if (record->refusal_ == nullptr) record->refusal_ = rewriter.ComputeDepths();
  if (record->refusal_ == nullptr) record->refusal_ = rewriter.PlaceProbes(&record->sites_);
  if (record->refusal_ == nullptr) record->refusal_ = rewriter.LayOut();
  OwnedRef probe;
  PyCodeObject* copy = nullptr;
  if (record->refusal_ == nullptr) {
    auto* object = PyObject_New(ProbeObject, &ProbeAccess::type);
    if (object == nullptr) {
      PyErr_Clear();
      return nullptr;
    }
    object->record = nullptr;
    probe = OwnedRef::Steal(reinterpret_cast<PyObject*>(object));
    copy = rewriter.Emit(probe.get(), &record->site_at_unit_);
    if (copy == nullptr) record->refusal_ = "the interpreter rejects an instrumented copy of it";
  }
  // The slots last: from here on the code objects own what hangs on them.
  if (copy != nullptr) {
    OwnedRef owned_copy = OwnedRef::Steal(reinterpret_cast<PyObject*>(copy));
    if (!compat::SetExtra(copy, g_extra_index, reinterpret_cast<char*>(probe.get()) + 1) ||
        !compat::SetExtra(code, g_extra_index, record.get())) {
      return nullptr;
    }
    record->copy_ = reinterpret_cast<PyCodeObject*>(owned_copy.release());
    record->probe_ = probe.get();
    reinterpret_cast<ProbeObject*>(probe.get())->record = record.get();
    record->stack_growth_ = rewriter.stack_size() - code->co_stacksize;
    compat::GrowStack(code, record->stack_growth_);
    record->number_ = ++g_num_copies;
  } else {
    if (!compat::SetExtra(code, g_extra_index, record.get())) return nullptr;
    ++g_num_refused;
  }
  return record;
}

uint64_t Instrumenter::num_copies() noexcept { return g_num_copies; }
uint64_t Instrumenter::num_refused() noexcept { return g_num_refused; }
uint64_t Instrumenter::num_mismatches() noexcept { return g_num_mismatches; }

}  // namespace cuvil::agent
