// Random number generators, and the hooks that PyTorch calls for an accelerator.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/GeneratorForPrivateuseone.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/DeviceGuard.h>

#include <vector>

#include "simulated_device/generators.h"
#include "simulated_device/memory.h"
#include "simulated_device/streams.h"

namespace tessera::sim {
namespace {

/// The state of a generator: its seed, and the number of operators that have drawn numbers.
class GeneratorImpl final : public c10::GeneratorImpl {
 public:
  explicit GeneratorImpl(c10::DeviceIndex device)
      : c10::GeneratorImpl({kSim, device}, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}
  void set_current_seed(std::uint64_t seed) override {
    seed_ = seed;
    offset_ = 0;
  }
  void set_offset(std::uint64_t offset) override { offset_ = offset; }
  std::uint64_t get_offset() const override { return offset_; }
  std::uint64_t current_seed() const override { return seed_; }
  std::uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return seed_;
  }
  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(state.numel() == 16, "sim: a generator's state has 16 bytes, not ", state.numel());
    const auto* const words = static_cast<const std::uint64_t*>(state.data());
    seed_ = words[0];
    offset_ = words[1];
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    const at::Tensor state = at::empty({16}, at::kByte);
    auto* const words = static_cast<std::uint64_t*>(state.data_ptr());
    words[0] = seed_;
    words[1] = offset_;
    return state.getIntrusivePtr();
  }

 private:
  GeneratorImpl* clone_impl() const override {
    auto* const copy = new GeneratorImpl(device_.index());
    copy->seed_ = seed_;
    copy->offset_ = offset_;
    return copy;
  }
  std::uint64_t seed_ = c10::default_rng_seed_val;
  std::uint64_t offset_ = 0;
};

std::vector<at::Generator>& default_generators() {
  static auto* const generators = new std::vector<at::Generator>;
  return *generators;
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex /*device*/) const override { return true; }
  c10::DeviceIndex deviceCount() const override {
    return static_cast<c10::DeviceIndex>(default_generators().size());
  }
  c10::DeviceIndex getCurrentDevice() const override { return current_device(); }
  void setCurrentDevice(c10::DeviceIndex device) const override { exchange_device(device); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return exchange_device(device);
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return exchange_device(device);
  }
  bool isPinnedPtr(const void* address) const override { return is_pinned(address); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  at::Device getDeviceFromPtr(void* /*address*/) const override { return {kSim, current_device()}; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return default_generator(device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return new_generator(device);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, std::size_t nbytes) const override {
    c10::StorageImpl* const impl = storage.unsafeGetStorageImpl();
    const c10::DeviceGuard on(impl->device());
    c10::DataPtr memory = device_allocator()->allocate(nbytes);
    const auto kept = static_cast<std::int64_t>(std::min(nbytes, impl->nbytes()));
    if (kept > 0) {
      const auto bytes_at = [&](void* address) {
        return at::from_blob(address, {kept}, at::TensorOptions(at::kByte).device(impl->device()));
      };
      const at::Tensor from = bytes_at(impl->mutable_data());
      const at::Tensor to = bytes_at(memory.get());
      launch(current_stream(current_device()), "resize", {from}, {to},
             [to = in_kernel(to), from = in_kernel(from)] { to.copy_(from); });
    }
    impl->set_data_ptr_noswap(std::move(memory));
    impl->set_nbytes(nbytes);
  }
};

}  // namespace

const at::Generator& default_generator(c10::DeviceIndex device) {
  return default_generators().at(static_cast<std::size_t>(device < 0 ? current_device() : device));
}

at::Generator new_generator(c10::DeviceIndex device) {
  return at::make_generator<GeneratorImpl>(device < 0 ? current_device() : device);
}

at::Generator take_numbers(at::Generator generator) {
  const std::lock_guard lock(generator.mutex());
  const std::uint64_t offset = generator.get_offset();
  generator.set_offset(offset + 1);
  return at::detail::createCPUGenerator(generator.current_seed() * 1'000'003 + offset);
}

void register_hooks(int num_devices) {
  for (int device = 0; device < num_devices; ++device) {
    default_generators().push_back(new_generator(static_cast<c10::DeviceIndex>(device)));
  }
  at::RegisterPrivateUse1HooksInterface(new Hooks);
}

}  // namespace tessera::sim
