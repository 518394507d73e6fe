#pragma once

#include <c10/core/Device.h>

#include <chrono>
#include <functional>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace tessera::dist {

/// How tensors are sent between the ranks of a group.
struct Transport {
  std::string name;
  /// The device of small tensors that groups create for themselves.
  at::Device device = at::kCPU;
  /// Whether a group of one rank gets a backend too. False: it copies.
  bool connects_one_rank = false;
  /// Connects the ranks that share `store`. Collective.
  std::function<c10::intrusive_ptr<c10d::Backend>(const c10::intrusive_ptr<c10d::Store>& store,
                                                  int rank, int size,
                                                  std::chrono::milliseconds timeout)>
      connect;
};

/// Returns Gloo, which uses sockets. Sends tensors of the CPU directly, those of CUDA devices
/// through the host. `interface`: the network interface to bind to, such as `eth0`. Empty:
/// GLOO_SOCKET_IFNAME, else the interface of the host's name, else loopback.
Transport gloo(const std::string& interface = {});

}  // namespace tessera::dist
