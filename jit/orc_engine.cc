#include "jit/orc_engine.h"

#include <llvm/Config/llvm-config.h>
#if LLVM_VERSION_MAJOR >= 20
#include <llvm/ExecutionEngine/Orc/AbsoluteSymbols.h>
#endif
#include <llvm/ExecutionEngine/Orc/JITTargetMachineBuilder.h>
#include <llvm/ExecutionEngine/Orc/LLJIT.h>
#include <llvm/ExecutionEngine/Orc/ObjectLinkingLayer.h>
#include <llvm/Support/MemoryBuffer.h>
#include <llvm/Support/TargetSelect.h>

#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace cuvil::jit {
namespace {

std::string Text(llvm::Error error) { return llvm::toString(std::move(error)); }

absl::StatusOr<llvm::orc::JITTargetMachineBuilder> DetectTarget() {
  // The first caller registers the native target; a function-local static makes the others wait for it.
  static const bool registered = [] {
    return !llvm::InitializeNativeTarget() && !llvm::InitializeNativeTargetAsmPrinter();
  }();
  if (!registered) return absl::UnavailableError("LLVM was built without a code generator for this processor");
  auto builder = llvm::orc::JITTargetMachineBuilder::detectHost();
  if (!builder) return absl::UnavailableError(absl::StrCat("detectHost: ", Text(builder.takeError())));
  return std::move(*builder);
}

int WidestVectorBytes(const std::string& features) {
  if (features.find("+avx512f") != std::string::npos) return 64;
  if (features.find("+avx2") != std::string::npos) return 32;
  return 16;
}

HostCpu Describe(const llvm::orc::JITTargetMachineBuilder& builder) {
  HostCpu host;
  host.triple = builder.getTargetTriple().str();
  host.name = builder.getCPU();
  host.features = builder.getFeatures().getString();
  host.vector_width_bytes = WidestVectorBytes(host.features);
  return host;
}

// What the code generators of LLVM call on their own account. fma is called where the processor has no such
// instruction.
llvm::orc::SymbolMap RuntimeSymbols(llvm::orc::ExecutionSession& session, const llvm::DataLayout& layout) {
  llvm::orc::MangleAndInterner mangle(session, layout);
  llvm::orc::SymbolMap symbols;
  auto add = [&](const char* name, auto* function) {
    symbols[mangle(name)] = {llvm::orc::ExecutorAddr::fromPtr(function), llvm::JITSymbolFlags::Exported};
  };
  add("memcpy", &std::memcpy);
  add("memmove", &std::memmove);
  add("memset", &std::memset);
  add("fma", static_cast<double (*)(double, double, double)>(&std::fma));
  add("fmaf", &::fmaf);
  return symbols;
}

}  // namespace

// What modules share with their engine: the ORC session. Destroyed after the last library in it was removed.
class OrcEngine::Session {
 public:
  Session(std::unique_ptr<llvm::orc::LLJIT> jit, HostCpu host) : jit_(std::move(jit)), host_(std::move(host)) {}

  const HostCpu& host() const { return host_; }
  llvm::orc::LLJIT& jit() { return *jit_; }

  // Each image is a library of its own: names never clash, and removing the library unmaps the code.
  std::string NextLibraryName(const std::string& image) {
    return absl::StrCat(image, ".", next_library_.fetch_add(1, std::memory_order_relaxed));
  }

 private:
  std::unique_ptr<llvm::orc::LLJIT> jit_;
  const HostCpu host_;
  std::atomic<uint64_t> next_library_{0};  // relaxed: only uniqueness matters
};

OrcEngine::OrcEngine(std::shared_ptr<Session> session) : session_(std::move(session)) {}
OrcEngine::~OrcEngine() = default;

const HostCpu& OrcEngine::host() const { return session_->host(); }

absl::StatusOr<std::unique_ptr<OrcEngine>> OrcEngine::Create() {
  auto target = DetectTarget();
  if (!target.ok()) return target.status();
  HostCpu host = Describe(*target);

  llvm::orc::LLJITBuilder builder;
  builder.setJITTargetMachineBuilder(std::move(*target));
  // No constructors, thread-local variables or unwinding in kernels, so no platform support.
  builder.setPlatformSetUp(llvm::orc::setUpInactivePlatform);
  builder.setLinkProcessSymbolsByDefault(false);
  builder.setObjectLinkingLayerCreator([](llvm::orc::ExecutionSession& session, auto&&...) {
    return std::make_unique<llvm::orc::ObjectLinkingLayer>(session);
  });
  auto jit = builder.create();
  if (!jit) return absl::UnavailableError(absl::StrCat("LLJIT: ", Text(jit.takeError())));
  return std::unique_ptr<OrcEngine>(new OrcEngine(std::make_shared<Session>(std::move(*jit), std::move(host))));
}

absl::StatusOr<CompiledModule> OrcEngine::Load(const ObjectImage& image) {
  auto fail = [&](absl::string_view step, llvm::Error error) {
    return absl::InternalError(absl::StrCat("loading ", image.name, ", ", step, ": ", Text(std::move(error))));
  };
  llvm::orc::LLJIT& jit = session_->jit();
  auto library = jit.createJITDylib(session_->NextLibraryName(image.name));
  if (!library) return fail("createJITDylib", library.takeError());

  // From here on the deleter removes the library, also when a later step fails.
  std::shared_ptr<const void> code(static_cast<const void*>(&*library),
                                   [session = session_, &dylib = *library](const void*) {
                                     // A failure leaks one mapping; there is nobody to tell.
                                     llvm::consumeError(session->jit().getExecutionSession().removeJITDylib(dylib));
                                   });

  auto symbols = RuntimeSymbols(jit.getExecutionSession(), jit.getDataLayout());
  if (auto error = library->define(llvm::orc::absoluteSymbols(std::move(symbols))))
    return fail("define", std::move(error));
  auto buffer = llvm::MemoryBuffer::getMemBufferCopy(llvm::StringRef(image.bytes), image.name);
  if (auto error = jit.addObjectFile(*library, std::move(buffer))) return fail("addObjectFile", std::move(error));

  CompiledModule::EntryPoints entry_points;
  for (const std::string& name : image.entry_points) {
    auto address = jit.lookup(*library, name);
    if (!address) return fail(name, address.takeError());
    entry_points.emplace(name, address->toPtr<void*>());
  }
  return CompiledModule(std::move(code), std::move(entry_points));
}

absl::StatusOr<HostCpu> DetectHostCpu() {
  auto target = DetectTarget();
  if (!target.ok()) return target.status();
  return Describe(*target);
}

}  // namespace cuvil::jit
