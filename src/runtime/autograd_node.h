#pragma once

#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>

#include <memory>
#include <type_traits>
#include <utility>

namespace tessera {

/// Creates a node of autograd's graph in the pointer type that libtorch uses: a std::shared_ptr (as
/// in torch 2.11) or a c10::intrusive_ptr (2.14, 2.15).
template <class Node, class... Args>
auto make_node(Args&&... args) {
  using Held = decltype(torch::autograd::Edge::function);
  if constexpr (std::is_same_v<Held, std::shared_ptr<torch::autograd::Node>>) {
    return std::make_shared<Node>(std::forward<Args>(args)...);
  } else {
    return c10::make_intrusive<Node>(std::forward<Args>(args)...);
  }
}

}  // namespace tessera
