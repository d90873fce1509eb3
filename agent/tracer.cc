#include "agent/tracer.h"

#include <algorithm>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "agent/call_table.h"
#include "agent/process_lifetime.h"
#include "agent/py_ref.h"
#include "agent/torch_files.h"

namespace cuvil::agent {
namespace {

std::string Text(PyObject* unicode) {
  const char* text = unicode == nullptr ? nullptr : PyUnicode_AsUTF8(unicode);
  if (text == nullptr) PyErr_Clear();
  return text == nullptr ? "?" : text;
}

// Whether an instruction of this class may enter a Python frame. Elsewhere a frame is a finalizer, a signal handler
// or a callback of the garbage collector: not the model.
bool MayEnterFrame(Op op) {
  switch (op) {
    case Op::kUnknown:
    case Op::kPure:
    case Op::kLoadDeref:
    case Op::kBuild:
    case Op::kBuildString:
    case Op::kListAppend:
    case Op::kMakeFunction:
    case Op::kIsOp:
    case Op::kBranchNone:
    case Op::kReturn:
    case Op::kListToTuple:
      return false;
    default:
      return true;
  }
}

}  // namespace

PyObject* InternedName(const char* text) {
  static ProcessLifetime<std::unordered_map<const char*, PyObject*>> names;
  PyObject*& name = (*names)[text];
  if (name == nullptr) name = PyUnicode_InternFromString(text);
  return name;
}

void Tracer::Refuse(const char* code, std::string message, const char* advice, bool retry) {
  if (refused()) return;
  refusal_.code = code;
  refusal_.message = std::move(message);
  refusal_.advice = advice;
  refusal_.retry = retry;
  if (!frames_.empty()) {
    CodePlace place = PlaceIn(UserFrame());
    refusal_.file = std::move(place.file);
    refusal_.line = place.line;
  }
}

void Tracer::OnFrameEnter(const FrameView& frame, bool instrumented, const char* why_not) noexcept {
  ErrorScope errors;
  ShowMode();
  heap_.Hold(reinterpret_cast<PyObject*>(frame.code()));
  bool ignored = (!frames_.empty() && frames_.back().ignored) || HasNoNetEffect(frame.code());
  if (!refused() && !ignored) {
    // A generator that the call made may be closed by any instruction that drops it: its own code, as in eager.
    PyObject* generator = frame.generator();
    bool own_generator = generator != nullptr && generators_.count(generator) != 0;
    if (!frames_.empty() && !own_generator) {
      FrameView caller = frame.previous();
      if (caller.id() != frames_.back().id || !MayEnterFrame(frames_.back().op)) {
        Refuse(
            "foreign-frame",
            absl::StrCat("a function ran that no instruction of the model called: ", Text(frame.code()->co_qualname)),
            "finalizers, signal handlers and GC callbacks may run at any time; the next call is traced anew", true);
      }
    }
    if (!instrumented) {
      Refuse("frame", absl::StrCat("a frame cannot be watched: ", why_not),
             "make generators inside of the call; if the stack was full, a later call finds room", true);
    }
    if (generator != nullptr && !own_generator) {
      Refuse("generator-state", "resumes a generator that was made before the call",
             "make generators inside of the call");
    }
    if (frame.function() != nullptr && !frame.resumed()) {
      heap_.TouchFunction(reinterpret_cast<PyObject*>(frame.function()));
    }
    ++frame_counts_[frame.code()];
  }
  if (refused()) WithdrawMode();
  frames_.push_back({frame.id(), frame.code(), -1, Op::kUnknown, ignored, nullptr});
}

void Tracer::OnFrameExit(const FrameView& frame, bool raised) noexcept {
  // A frame whose entry was not announced (none is known) must not unbalance the stack.
  if (frames_.empty() || frames_.back().id != frame.id()) return;
  // The first frame that an exception leaves; the next ones follow without an instruction of their own.
  if (raised && !unwinding_ && !refused()) raised_at_ = PlaceIn(UserFrame());
  unwinding_ = raised;
  frames_.pop_back();
}

void Tracer::OnFrameLeave(const FrameView& frame, FrameExit exit, PyObject* result) noexcept {
  if (exit == FrameExit::kReturned && frame.creates_generator() && result != nullptr) generators_.insert(result);
  OnFrameExit(frame, exit == FrameExit::kRaised);
}

void Tracer::HideModeFrom(const FrameView& frame, const Site& site, PyObject** sp) {
  // torch.nn.MultiheadAttention and others take another path inside of a dispatch mode, and the recorder is one. Not
  // in a refused trace: other tools may have pushed modes and taken over frames, so the order could not be kept.
  CallSiteView call;
  if (constants_ == nullptr || !DecodeCall(frame, site, sp, &call) || !PyCFunction_Check(call.callable)) return;
  if (FindCallModel(CImplementation(call.callable)).model != CallModel::kDispatchModes) return;
  constants_->HideMode();
  mode_hidden_ = true;
}

void Tracer::ShowMode() {
  if (!mode_hidden_) return;
  mode_hidden_ = false;
  constants_->ShowMode();
}

void Tracer::WithdrawMode() {
  // The rest of the call is not to notice that it was traced: what torch.jit.trace made fails inside of a dispatch
  // mode.
  mode_hidden_ = false;
  if (constants_ != nullptr) constants_->WithdrawMode();
}

void Tracer::OnProbe(const FrameView& frame, const Site& site, PyObject** stack_top) noexcept {
  ShowMode();
  unwinding_ = false;
  if (site.op == Op::kCall && !refused()) HideModeFrom(frame, site, stack_top);
  const bool announced = !frames_.empty() && frames_.back().id == frame.id() && !frames_.back().ignored;
  if (announced) WatchBranch(frames_.back(), frame, site, stack_top);
  if (refused()) {
    StopWatching();
    WithdrawMode();
    return;
  }
  if (!announced) return;
  Frame& top = frames_.back();
  top.offset = site.offset;
  top.op = site.op;
  if (site.op == Op::kPure) return;
  if (site.op == Op::kReturn && frame.code() == forward_) returned_at_ = PlaceIn(top);
  Dispatch(frame, site, stack_top);
  if (!heap_.problem().empty()) {
    Refuse("unwatchable", heap_.problem(), "keep that object out of what forward reads, or make it plainer");
  }
  if (refused()) {
    StopWatching();
    WithdrawMode();
  }
  PyErr_Clear();
}

// Nothing is kept alive longer than in eager once it serves no purpose: finalizers and collections see it.
void Tracer::StopWatching() {
  heap_.Release();
  if (collector_pause_ != nullptr) collector_pause_->End();
}

bool Tracer::HasNoNetEffect(PyCodeObject* code) {
  std::string name = Text(code->co_name);
  if (name != "__getattr__" && name != "find_torch_dispatch_rule" && name != "tag") return false;
  std::string file = Text(code->co_filename);
  if (!IsTorchFile(file)) return false;
  return (absl::EndsWith(file, "/torch/_ops.py") && name == "__getattr__") ||
         (absl::EndsWith(file, "/torch/_library/simple_registry.py") && name == "find_torch_dispatch_rule") ||
         // Once torch.compile has been used, every module that is made is noted in a weak dict until it dies. A replay
         // makes none.
         (absl::EndsWith(file, "/torch/_dynamo/mutation_guard.py") && name == "tag");
}

void Tracer::TakeLock() {
  ++locks_held_;
  if (!frames_.empty()) locked_at_ = PlaceIn(UserFrame());
  // Of locks that guard caches and logging, whose content the guards compare, a plan need not know. Whoever holds the
  // program's own makes its calls wait, or fail to get it.
  const std::string file = frames_.empty() ? "" : Text(frames_.back().code->co_filename);
  if (!file.empty() && (file == ModuleFile("functools") || file == ModuleFile("logging"))) return;
  if (!frames_.empty() && IsTorchCode(frames_.back().code)) return;
  Refuse("lock", "takes a lock that others may hold", "take it around the call of the model");
}

bool Tracer::IsTorchCode(PyCodeObject* code) const {
  auto [found, inserted] = is_torch_code_.try_emplace(code, false);
  if (inserted) found->second = IsTorchFile(Text(code->co_filename));
  return found->second;
}

// The innermost frame outside of torch, where the user can act; the innermost of all if there is none.
const Tracer::Frame& Tracer::UserFrame() const {
  for (auto frame = frames_.rbegin(); frame != frames_.rend(); ++frame) {
    if (!IsTorchCode(frame->code)) return *frame;
  }
  return frames_.back();
}

CodePlace Tracer::PlaceIn(const Frame& frame) {
  // Some instructions that the compiler adds belong to no line.
  const int line = ExactSourceLine(frame.code, std::max(frame.offset, 0));
  return {Text(frame.code->co_filename), line > 0 ? line : frame.code->co_firstlineno};
}

uint32_t Tracer::CurrentSource() {
  if (frames_.empty()) {
    if (sources_.empty()) sources_.emplace_back();
    return 0;
  }
  const Frame& top = frames_.back();
  const Frame& user = UserFrame();
  PyObject* module = root_ == nullptr ? nullptr : ModuleCallScope::innermost()->module();
  auto [found, inserted] = source_index_.try_emplace({top.code, top.offset, user.code, user.offset, module},
                                                     static_cast<uint32_t>(sources_.size()));
  if (!inserted) return found->second;
  trace::SourceLocation location;
  location.file = Text(top.code->co_filename);
  location.line = ExactSourceLine(top.code, std::max(top.offset, 0));
  location.function = Text(top.code->co_qualname);
  location.instruction = top.offset;
  location.user_file = Text(user.code->co_filename);
  location.user_line = ExactSourceLine(user.code, std::max(user.offset, 0));
  location.user_function = Text(user.code->co_qualname);
  if (root_ != nullptr) location.module = root_->PathOfInnermost();
  sources_.push_back(std::move(location));
  return found->second;
}

std::string Tracer::CurrentFile() const {
  return frames_.empty() ? std::string() : Text(frames_.back().code->co_filename);
}

bool Tracer::CalledFromTorchOps() const { return absl::EndsWith(CurrentFile(), "torch/_ops.py"); }

void Tracer::WatchBranch(Frame& top, const FrameView& frame, const Site& site, PyObject** sp) {
  const Site* last = std::exchange(top.branch, nullptr);
  const bool now =
      site.op == Op::kBranchNone || (site.op == Op::kBranchTruth && sp[-1] != nullptr && PyBool_Check(sp[-1]));
  // Other truths are told by methods that may be Python, and iterators by being advanced: not asked twice. Where the
  // frame goes on says what the answer was.
  if (!now && (site.op == Op::kBranchTruth || site.op == Op::kForIter)) top.branch = &site;
  if (!now && last == nullptr) return;
  const CodeRecord* record = Instrumenter::FindRecord(frame.code());
  if (record == nullptr) return;
  if (now) CountBranch(*record, site, site.op == Op::kBranchNone ? sp[-1] == Py_None : sp[-1] == Py_True);
  if (last == nullptr) return;
  // The first instructions with a probe on either way. An exception's handler is on neither.
  const auto reached = [&](int offset) {
    const std::vector<Site>& sites = record->sites();
    const auto found = std::lower_bound(sites.begin(), sites.end(), offset,
                                        [](const Site& candidate, int wanted) { return candidate.offset < wanted; });
    return found != sites.end() && found->offset == site.offset;
  };
  const bool jumped = reached(last->target);
  if (jumped == reached(last->next)) return;
  CountBranch(*record, *last, last->op == Op::kForIter ? !jumped : jumped == BranchSense(*last));
}

void Tracer::CountBranch(const CodeRecord& record, const Site& site, bool outcome) {
  auto [found, inserted] = branches_.try_emplace({record.number(), site.offset});
  trace::BranchCount& count = found->second;
  if (inserted) {
    PyCodeObject* code = record.original();
    count.file = Text(code->co_filename);
    count.line = ExactSourceLine(code, site.offset);
    count.column = ExactSourceColumn(code, site.offset);
    count.instruction = site.offset;
    count.kind = site.op == Op::kForIter      ? trace::BranchKind::kLoop
                 : site.op == Op::kBranchNone ? trace::BranchKind::kNone
                                              : trace::BranchKind::kTruth;
  }
  ++(outcome ? count.num_true : count.num_false);
}

std::vector<trace::BranchCount> Tracer::BranchCounts() const {
  std::vector<trace::BranchCount> result;
  result.reserve(branches_.size());
  for (const auto& [where, count] : branches_) result.push_back(count);
  return result;
}

std::vector<trace::FrameCount> Tracer::FrameCounts() const {
  std::vector<trace::FrameCount> result;
  for (const auto& [code, count] : frame_counts_) {
    result.push_back({Text(code->co_filename), code->co_firstlineno, Text(code->co_qualname), count});
  }
  return result;
}

void Tracer::Write(PyObject* object) {
  heap_.set_source(CurrentSource());
  heap_.MarkWritten(object);
}

}  // namespace cuvil::agent
