// Lets torch make fake CUDA tensors without a GPU, which have a device but neither memory nor kernels.
//
// A build without CUDA has no device guard for it and ends the process at the first operation on a CUDA tensor. A build
// with CUDA has one, but without a GPU its backward pass refuses the device. Loading this library registers a guard that
// does nothing, and hooks that say that CUDA is there.

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <algorithm>

namespace {

constexpr size_t kBefore = 2;  // entries of a table of methods before the first one
constexpr size_t kMethods = 128;  // more than the interface has
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
    // torch makes its own hooks once and offers no way to replace them, so they get the methods of ours: all of them in
    // a build without CUDA, and otherwise only the one that asks for a GPU, since others tell versions of libraries.
    static Hooks hooks;
    const auto& made = at::detail::getCUDAHooks();
    if (!made.isBuilt()) {
      *(void**)(&made) = *(void**)(&hooks);
      return;
    }
    static void* methods[kBefore + kMethods];
    void** theirs = *(void***)(&made);
    std::copy(theirs - kBefore, theirs + kMethods, methods);
    auto method = &at::CUDAHooksInterface::hasPrimaryContext;
    const auto place = (*(ptrdiff_t*)(&method) - 1) / sizeof(void*);  // how a compiler stores a virtual method
    methods[kBefore + place] = (*(void***)(&hooks))[place];
    *(void***)(&made) = methods + kBefore;
  }
};

const Registration registration;

}  // namespace
