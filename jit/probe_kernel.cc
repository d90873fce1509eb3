#include "jit/probe_kernel.h"

#include <llvm/Config/llvm-config.h>
#include <llvm/IR/IRBuilder.h>
#include <llvm/IR/LegacyPassManager.h>
#include <llvm/IR/Module.h>
#include <llvm/IR/Verifier.h>
#include <llvm/MC/TargetRegistry.h>
#include <llvm/Support/raw_ostream.h>
#include <llvm/Target/TargetMachine.h>
#include <llvm/Target/TargetOptions.h>

#include <chrono>
#include <cmath>
#include <cstddef>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "jit/compiled_module.h"
#include "jit/orc_engine.h"

namespace cuvil::jit {
namespace {

absl::StatusOr<std::unique_ptr<llvm::TargetMachine>> CreateTargetMachine(const HostCpu& host) {
#if LLVM_VERSION_MAJOR >= 21
  const llvm::Triple triple(host.triple);
#else
  const std::string& triple = host.triple;
#endif
  std::string error;
  const llvm::Target* target = llvm::TargetRegistry::lookupTarget(triple, error);
  if (target == nullptr) return absl::UnavailableError(absl::StrCat("lookupTarget(", host.triple, "): ", error));
  std::unique_ptr<llvm::TargetMachine> machine(
      target->createTargetMachine(triple, host.name, host.features, llvm::TargetOptions(), llvm::Reloc::PIC_,
                                  std::nullopt, llvm::CodeGenOptLevel::Default));
  if (machine == nullptr) return absl::UnavailableError(absl::StrCat("createTargetMachine(", host.name, ") failed"));
  return machine;
}

// Emits the body block by block: whole vectors in a loop, then one masked vector for what is left.
void EmitProbeKernel(llvm::Module& module, const HostCpu& host) {
  llvm::LLVMContext& context = module.getContext();
  llvm::IRBuilder<> b(context);
  llvm::Type* f32 = b.getFloatTy();
  llvm::Type* i64 = b.getInt64Ty();
  llvm::Type* pointer = b.getPtrTy();
  auto* type = llvm::FunctionType::get(b.getVoidTy(), {pointer, pointer, f32, f32, i64}, false);
  auto* function = llvm::Function::Create(type, llvm::Function::ExternalLinkage, kProbeKernelName, module);
  function->setDoesNotThrow();
  function->addFnAttr("target-cpu", host.name);
  function->addFnAttr("target-features", host.features);
  // skylake-avx512 and sapphirerapids otherwise split 512-bit vectors into halves.
  function->addFnAttr("prefer-vector-width", std::to_string(8 * host.vector_width_bytes));
  for (unsigned argument : {0u, 1u}) function->addParamAttr(argument, llvm::Attribute::NoAlias);

  const unsigned lanes = static_cast<unsigned>(host.vector_width_bytes) / sizeof(float);
  auto* vector = llvm::FixedVectorType::get(f32, lanes);
  llvm::Value* x = function->getArg(0);
  llvm::Value* y = function->getArg(1);
  llvm::Value* n = function->getArg(4);
  auto* entry = llvm::BasicBlock::Create(context, "entry", function);
  auto* loop = llvm::BasicBlock::Create(context, "loop", function);
  auto* after_loop = llvm::BasicBlock::Create(context, "after_loop", function);
  auto* tail = llvm::BasicBlock::Create(context, "tail", function);
  auto* done = llvm::BasicBlock::Create(context, "done", function);

  b.SetInsertPoint(entry);
  llvm::Value* scale = b.CreateVectorSplat(lanes, function->getArg(2));
  llvm::Value* shift = b.CreateVectorSplat(lanes, function->getArg(3));
  auto affine = [&](llvm::Value* v) { return b.CreateIntrinsic(llvm::Intrinsic::fma, {vector}, {v, scale, shift}); };
  auto at = [&](llvm::Value* base, llvm::Value* index) { return b.CreateInBoundsGEP(f32, base, index); };
  llvm::Value* whole = b.CreateAnd(n, b.getInt64(~(static_cast<uint64_t>(lanes) - 1)));
  b.CreateCondBr(b.CreateICmpSGT(whole, b.getInt64(0)), loop, after_loop);

  b.SetInsertPoint(loop);
  llvm::PHINode* i = b.CreatePHI(i64, 2);
  i->addIncoming(b.getInt64(0), entry);
  const llvm::Align element_alignment(sizeof(float));
  b.CreateAlignedStore(affine(b.CreateAlignedLoad(vector, at(x, i), element_alignment)), at(y, i), element_alignment);
  llvm::Value* next = b.CreateNSWAdd(i, b.getInt64(lanes));
  i->addIncoming(next, loop);
  b.CreateCondBr(b.CreateICmpSLT(next, whole), loop, after_loop);

  b.SetInsertPoint(after_loop);
  b.CreateCondBr(b.CreateICmpSLT(whole, n), tail, done);

  b.SetInsertPoint(tail);
  std::vector<llvm::Constant*> lane_numbers;
  for (unsigned lane = 0; lane < lanes; ++lane) lane_numbers.push_back(b.getInt64(lane));
  llvm::Value* left = b.CreateVectorSplat(lanes, b.CreateSub(n, whole));
  llvm::Value* mask = b.CreateICmpSLT(llvm::ConstantVector::get(lane_numbers), left);
  llvm::Value* loaded =
      b.CreateMaskedLoad(vector, at(x, whole), element_alignment, mask, llvm::Constant::getNullValue(vector));
  b.CreateMaskedStore(affine(loaded), at(y, whole), element_alignment, mask);
  b.CreateBr(done);

  b.SetInsertPoint(done);
  b.CreateRetVoid();
}

}  // namespace

absl::StatusOr<ObjectImage> CompileProbeKernel(const HostCpu& host) {
  auto machine = CreateTargetMachine(host);
  if (!machine.ok()) return machine.status();
  llvm::LLVMContext context;
  llvm::Module module(kProbeKernelName, context);
#if LLVM_VERSION_MAJOR >= 21
  module.setTargetTriple((*machine)->getTargetTriple());
#else
  module.setTargetTriple((*machine)->getTargetTriple().str());
#endif
  module.setDataLayout((*machine)->createDataLayout());
  EmitProbeKernel(module, host);

  std::string problem;
  llvm::raw_string_ostream problem_stream(problem);
  if (llvm::verifyModule(module, &problem_stream))
    return absl::InternalError(absl::StrCat(kProbeKernelName, ": ", problem));

  llvm::SmallVector<char, 0> bytes;
  llvm::raw_svector_ostream stream(bytes);
  llvm::legacy::PassManager passes;
  if ((*machine)->addPassesToEmitFile(passes, stream, nullptr, llvm::CodeGenFileType::ObjectFile)) {
    return absl::UnavailableError(absl::StrCat("no object emission for ", host.triple));
  }
  passes.run(module);
  return ObjectImage{kProbeKernelName, std::string(bytes.begin(), bytes.end()), {kProbeKernelName}};
}

absl::StatusOr<ProbeResult> RunProbeKernel() {
  const auto start = std::chrono::steady_clock::now();
  auto engine = OrcEngine::Create();
  if (!engine.ok()) return engine.status();
  auto image = CompileProbeKernel((*engine)->host());
  if (!image.ok()) return image.status();
  auto module = (*engine)->Load(*image);
  if (!module.ok()) return module.status();
  auto kernel = module->Get<ProbeKernel>(kProbeKernelName);
  if (!kernel.ok()) return kernel.status();
  const std::chrono::duration<double, std::milli> elapsed = std::chrono::steady_clock::now() - start;

  constexpr size_t kLength = 1021;  // prime: every width leaves a tail
  constexpr float kScale = 1.25f, kShift = -3.0f, kGuard = 12345.0f;
  std::vector<float> x(kLength), y(kLength + 1, kGuard);
  for (size_t i = 0; i < kLength; ++i) x[i] = 0.37f * static_cast<float>(i);
  (*kernel)(x.data(), y.data(), kScale, kShift, kLength);
  for (size_t i = 0; i < kLength; ++i) {
    const float expected = std::fma(x[i], kScale, kShift);
    if (y[i] != expected) {
      return absl::DataLossError(
          absl::StrCat(kProbeKernelName, ": element ", i, " is ", y[i], " instead of ", expected));
    }
  }
  if (y[kLength] != kGuard) return absl::DataLossError(absl::StrCat(kProbeKernelName, ": wrote past the end"));
  return ProbeResult{(*engine)->host(), LLVM_VERSION_STRING, elapsed.count()};
}

}  // namespace cuvil::jit
