#pragma once

#include <c10/core/Device.h>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "tessera/runtime/dist/group.h"

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

/// The ranks of a job as a grid with named axes, row-major: in a mesh of shape (A, B), rank =
/// a * B + b. Copies share their groups. What PyTorch calls DeviceMesh.
class Mesh {
 public:
  /// A named dimension of the grid, as this rank sees it.
  struct Axis {
    std::string name;
    std::shared_ptr<Group> group;  // the ranks that differ from this one only in this axis
  };

  /// A mesh of this process alone, with one axis `shard`.
  Mesh();
  /// Requires: `world.size()` is the product of the axes' sizes. `world` may be an axis itself.
  Mesh(std::shared_ptr<Group> world, std::vector<Axis> axes);

  int rank() const { return world_->rank(); }
  int world_size() const { return world_->size(); }
  const std::shared_ptr<Group>& world() const { return world_; }
  const std::vector<Axis>& axes() const { return axes_; }
  /// Throws: Error(invalid_argument) listing the axes of this mesh.
  const std::shared_ptr<Group>& axis(const std::string& name) const;

 private:
  std::shared_ptr<Group> world_;
  std::vector<Axis> axes_;
};

/// How to connect the ranks, and in which grid to arrange them.
struct MeshOptions {
  /// Names and sizes of the axes, outermost first. At most one size may be -1: it is computed from
  /// the world size. Empty: one axis `shard`.
  std::vector<std::pair<std::string, int>> axes{};
  /// How long a rank waits for another one in a collective and while connecting. Also becomes the
  /// store's time-out.
  std::chrono::milliseconds timeout = std::chrono::minutes(5);
  /// What sends the tensors: `gloo()`, or `nccl()` of nccl.h.
  Transport transport = gloo();
};

/// Connects the ranks that share `store`. Collective. Throws: Error(invalid_argument) if the
/// product of the axes is not the world size; Error(io) if a rank does not connect in time;
/// Error(unsupported) if the transport has no device here.
Mesh connect(const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size,
             const MeshOptions& options = {});

}  // namespace tessera::dist
