// Lets a build of torch without CUDA make fake CUDA tensors, which have a device but neither memory nor kernels.
//
// Such a build has no device guard for CUDA and ends the process at the first operation on a CUDA tensor. Loading this
// library registers a guard that does nothing, and hooks that say that CUDA is there.

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

const c10::Device kDevice(c10::DeviceType::CUDA, 0);

struct Guard : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  c10::Device getDevice() const override { return kDevice; }
  c10::Device exchangeDevice(c10::Device) const override { return kDevice; }
  c10::Stream getStream(c10::Device) const noexcept override { return c10::Stream(c10::Stream::DEFAULT, kDevice); }
  c10::Stream exchangeStream(c10::Stream stream) const noexcept override { return stream; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
};

struct Hooks : at::CUDAHooksInterface {
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
};

struct Registration {
  Registration() {
    static Guard guard;
    c10::impl::device_guard_impl_registry[static_cast<int>(c10::DeviceType::CUDA)].store(&guard);
    // torch makes its own hooks once and offers no way to replace them, so they get the methods of ours.
    static Hooks hooks;
    const auto& made = at::detail::getCUDAHooks();
    *(void**)(&made) = *(void**)(&hooks);
  }
};

const Registration registration;

}  // namespace
