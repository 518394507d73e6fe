#pragma once

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "tessera/runtime/dist/mesh.h"
#include "tessera/runtime/registry/registry.h"

namespace tessera::registry {

/// The mesh of a module that an API was applied to, stored for each module inside it whose
/// parameters the API manages. So a part of a model, such as its backbone, is known to be on all
/// ranks if it is used alone.
struct MeshAround final : ModuleState {
  explicit MeshAround(dist::Mesh its_mesh) : mesh(std::move(its_mesh)) {}
  dist::Mesh mesh;
};

/// Stores `mesh` for a module. Does nothing if the module has parameters, but none of those at or
/// below it `is_managed`.
template <class IsManaged>
void note_mesh_around(torch::nn::Module& module, const dist::Mesh& mesh,
                      const IsManaged& is_managed) {
  const std::vector<at::Tensor> parameters = module.parameters();
  const auto is_inside = [&](const at::Tensor& each) { return each.defined() && is_managed(each); };
  if (!parameters.empty() && std::ranges::none_of(parameters, is_inside)) return;
  attach(module, std::make_shared<MeshAround>(mesh));
}

}  // namespace tessera::registry
