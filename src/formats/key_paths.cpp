#include "formats/key_paths.h"

#include <cstddef>
#include <cstdint>
#include <map>
#include <string_view>
#include <variant>

#include "base/utf8.h"
#include "tessera/base/error.h"

namespace tessera::formats {
namespace {

/// Makes a text of a key that also shows the key's type. So `a.0` with the string "0" and `a.0`
/// with the list position 0 get different texts.
struct KeyText {
  std::string operator()(const std::string& key) const { return text('s', key); }
  std::string operator()(std::int64_t position) const {
    return text('i', std::to_string(position));
  }
  std::string operator()(const NonStringKey& key) const { return text('k', key.json); }

  static std::string text(char kind, const std::string& key) {
    return kind + std::to_string(key.size()) + ':' + key;
  }
};

class KeyTree {
 public:
  explicit KeyTree(const std::string& destination) : destination_(destination) {}

  void add(const std::string& name, const KeyPath& key_path, std::string_view what) {
    if (!tessera::detail::is_valid_utf8(name)) refuse(name, "name", "UTF-8", "other bytes");
    const KeyPath path = key_path.empty() ? KeyPath{name} : key_path;
    std::string at;
    for (std::size_t i = 0; i < path.size(); ++i) {
      const bool is_position = std::holds_alternative<std::int64_t>(path[i]);
      note(name, at, is_position ? "a list" : "a dict", path, i);
      at += std::visit(KeyText{}, path[i]);
    }
    note(name, at, what, path, path.size());
    if (spell(path) != name) {
      refuse(name, "key path", "keys that give the name when joined by dots",
             "keys that give " + spell(path));
    }
  }

 private:
  [[noreturn]] void refuse(const std::string& name, std::string_view rule,
                           std::string_view expected, std::string_view found) const {
    throw Error::expected(ErrorKind::invalid_argument, {.path = destination_, .fqn = name}, rule,
                          expected, found);
  }

  void note(const std::string& name, const std::string& at, std::string_view what,
            const KeyPath& path, std::size_t depth) {
    const auto [it, is_new] = kinds_.emplace(at, what);
    if (is_new || it->second == what) return;
    const KeyPath front(path.begin(), path.begin() + static_cast<std::ptrdiff_t>(depth));
    const std::string where = front.empty() ? "at the root" : "at " + spell(front);
    refuse(name, "key path", std::string(it->second) + " " + where, what);
  }

  const std::string& destination_;
  std::map<std::string, std::string_view> kinds_;
};

}  // namespace

void check_key_paths(const CheckpointContents& contents, const std::string& destination) {
  KeyTree tree(destination);
  for (const ValueEntry& value : contents.values) tree.add(value.name, value.key_path, "a value");
  for (const TensorEntry& tensor : contents.tensors) {
    tree.add(tensor.meta.fqn, tensor.key_path, "a tensor");
  }
  for (const Alias& alias : contents.aliases) tree.add(alias.fqn, alias.key_path, "a tensor");
}

}  // namespace tessera::formats
