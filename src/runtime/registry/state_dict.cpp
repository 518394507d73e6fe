#include "tessera/runtime/registry/state_dict.h"

#include <torch/types.h>

#include "runtime/torch_bridge.h"
#include "tessera/base/error.h"

namespace tessera {

StateTensor StateTensor::whole(const at::Tensor& tensor) {
  StateTensor entry;
  entry.dtype = dtype_of(tensor.scalar_type());
  entry.shape = Shape(tensor.sizes().begin(), tensor.sizes().end());
  entry.local_shards.push_back(
      {whole_box(entry.shape), tensor.detach().resolve_conj().resolve_neg().contiguous()});
  return entry;
}

bool StateTensor::is_whole() const {
  return local_shards.size() == 1 && numel_of(local_shards.front().region) == numel_of(shape);
}

at::Tensor StateTensor::tensor(const std::string& fqn) const {
  if (!is_whole()) {
    throw Error::expected(ErrorKind::invalid_argument, {.fqn = fqn}, "tensor of a state dict",
                          "the whole tensor on this rank", "some of its elements",
                          "use a state dict of type FULL, which has whole tensors");
  }
  return local_shards.front().tensor.view(shape);
}

StateDict::StateDict(const StateDict& other) : units(other.units) {
  for (const Item& item : other) set(item.fqn, item.entry, item.key_path);
}

StateDict& StateDict::operator=(const StateDict& other) {
  if (this != &other) *this = StateDict(other);
  return *this;
}

void StateDict::set(std::string fqn, StateEntry entry, formats::KeyPath key_path) {
  if (const auto it = places_.find(fqn); it != places_.end()) {
    it->second->entry = std::move(entry);
    it->second->key_path = std::move(key_path);
    return;
  }
  items_.push_back({fqn, std::move(entry), std::move(key_path)});
  places_.emplace(std::move(fqn), std::prev(items_.end()));
}

bool StateDict::erase(const std::string& fqn) {
  const auto it = places_.find(fqn);
  if (it == places_.end()) return false;
  items_.erase(it->second);
  places_.erase(it);
  return true;
}

const StateEntry* StateDict::find(const std::string& fqn) const {
  const auto it = places_.find(fqn);
  return it == places_.end() ? nullptr : &it->second->entry;
}

StateEntry* StateDict::find(const std::string& fqn) {
  const auto it = places_.find(fqn);
  return it == places_.end() ? nullptr : &it->second->entry;
}

at::Tensor StateDict::tensor(const std::string& fqn) const {
  const StateEntry* entry = find(fqn);
  if (entry == nullptr) {
    throw Error::expected(ErrorKind::not_found, {.fqn = fqn}, "key of the state dict",
                          "an entry of this name", "none");
  }
  if (const auto* alias = std::get_if<StateAlias>(entry)) {
    entry = find(alias->target);
    if (entry == nullptr || std::holds_alternative<StateAlias>(*entry)) {
      throw Error::expected(ErrorKind::not_found, {.fqn = fqn}, "target of the alias", "a tensor",
                            "no tensor " + alias->target);
    }
  }
  if (const auto* found = std::get_if<StateTensor>(entry)) return found->tensor(fqn);
  throw Error::expected(ErrorKind::invalid_argument, {.fqn = fqn}, "entry of the state dict",
                        "a tensor", std::string(type_name(std::get<Value>(*entry))));
}

}  // namespace tessera
