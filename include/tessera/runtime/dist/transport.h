#pragma once

#include <c10/core/Device.h>

#include <chrono>
#include <functional>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace tessera::dist {

/// What carries tensors between the ranks of a group.
struct Transport {
  std::string name;
  /// Of the small tensors that groups make for themselves.
  at::Device device = at::kCPU;
  /// Whether a group of one rank gets a backend as well, instead of copying.
  bool connects_one_rank = false;
  /// Connects the ranks that share `store`. Collective.
  std::function<c10::intrusive_ptr<c10d::Backend>(const c10::intrusive_ptr<c10d::Store>& store,
                                                  int rank, int size,
                                                  std::chrono::milliseconds timeout)>
      connect;
};

/// Sockets; for tensors on the CPU, and, by way of the host, on CUDA devices. `interface`: the
/// network interface that it binds to, such as `eth0`. Empty: GLOO_SOCKET_IFNAME, else the one of
/// the host's name, else loopback.
Transport gloo(const std::string& interface = {});

}  // namespace tessera::dist
