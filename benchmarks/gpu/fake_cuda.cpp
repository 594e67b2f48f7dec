// A CUDA device that does nothing, for a machine without one; preloaded into Python by fake_cuda.py.
//
// FakeTensorMode gives tensors a shape and a device but no memory, and needs no kernels. But torch still asks the device
// for its number, streams and events, and which kernels it has. Without a GPU, it answers these questions with errors.
// Here are answers. They replace those of torch's build for CUDA: either they have a higher priority, or
// `install_fake_cuda`, called after torch was imported, gives them last.

#include <ATen/Context.h>
#include <ATen/DeviceAccelerator.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::Stream;

static const Device DEVICE(DeviceType::CUDA, 0);
static const Stream STREAM(Stream::DEFAULT, DEVICE);

// Autograd asks for the kind of accelerator to decide whether gradients have streams. In a torch without CUDA, the
// answer is compiled in. This definition replaces it: a preloaded library precedes libtorch when symbols are looked up.
namespace at::accelerator {
std::optional<DeviceType> getAccelerator(bool) { return DeviceType::CUDA; }
}  // namespace at::accelerator

// Every operation on a device enters a guard, which selects the device. Autograd starts a thread for each device that
// a guard counts, and runs backward of CUDA tensors there, as on a GPU; it orders these threads by streams and events.
// The single stream has always finished, so that nothing ever waits.
struct Guard : c10::impl::NoOpDeviceGuardImpl<DeviceType::CUDA> {
  Device exchangeDevice(Device) const override { return DEVICE; }
  Device getDevice() const override { return DEVICE; }
  Stream getStream(Device) const noexcept override { return STREAM; }
  Stream getDefaultStream(Device) const override { return STREAM; }
  Stream exchangeStream(Stream) const noexcept override { return STREAM; }
  void record(void** event, const Stream&, const DeviceIndex, const c10::EventFlag) const override {
    static int recorded;  // an event that was recorded has an address
    *event = &recorded;
  }
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
};

// FakeTensorMode initialises CUDA before it creates the first tensor there, and torch asks for the current device when
// a device is given without a number.
namespace at {
struct CUDAHooks : CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  DeviceIndex current_device() const override { return 0; }
  int getNumGPUs() const override { return 1; }
};
C10_REGISTER_CLASS_WITH_PRIORITY(CUDAHooksRegistry, CUDAHooks, c10::REGISTRY_PREFERRED, CUDAHooks);
}  // namespace at

// Attention asks the device for its fused kernel, and without an answer computes the matrix of scores. This is the
// answer of a Hopper GPU, simplified: cuDNN's attention for half precision, memory-efficient attention for float32, and
// neither if the program has switched it off.
enum Kernel : int64_t { MATH = 0, EFFICIENT = 2, CUDNN = 3 };  // the numbers of torch.nn.attention.SDPBackend
static int64_t choose_attention(
    const at::Tensor& q, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, double, bool,
    std::optional<double>, bool) {
  if (q.scalar_type() == at::kFloat) {
    return at::globalContext().userEnabledMemEfficientSDP() ? EFFICIENT : MATH;
  }
  bool half = q.scalar_type() == at::kBFloat16 || q.scalar_type() == at::kHalf;
  return half && at::globalContext().userEnabledCuDNNSDP() ? CUDNN : MATH;
}

extern "C" void install_fake_cuda() {
  static c10::impl::DeviceGuardImplRegistrar registrar(DeviceType::CUDA, new Guard());
  at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&choose_attention);
}
