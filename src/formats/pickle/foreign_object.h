#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "formats/pickle/pickle_object.h"

namespace tessera::formats::pickle {

/// Says whether `object` is a global that is not in the allow-list, or a call of one: an object of
/// a class, or what a function returned. See [Note: Foreign globals] in unpickler.h.
bool is_foreign(Object object);

/// Returns the name of a foreign object's class or function: `argparse.Namespace`. If a function of
/// `copyreg` makes the object, returns the name of its class, not the name of that function.
std::string foreign_name(Object object);

/// Says what a foreign object is: `object of class argparse.Namespace`, `call of os.system`.
std::string foreign_in_words(Object object);

/// Says whether a foreign object is what a function call returned, as far as its name tells.
/// Returns false for objects of classes, also of those (datetime, NumPy) that are pickled as calls.
bool is_foreign_function_call(Object object);

/// Returns the object whose entries are the attributes of a foreign object: the dict given to BUILD
/// or, without BUILD, `object` itself (its class is derived from dict). Returns nothing if the
/// caller did not ask to read the class as a dict (`as_dict`), or if `object` also has other parts.
std::optional<Object> entries_as_dict(Object object);

/// Returns the names of all foreign globals of the graph, sorted, each once, at most `max_names`.
std::vector<std::string> foreign_names(const ObjectGraph& graph, std::size_t max_names);

/// Counts objects of one kind that other objects hold, at any depth. Each call of `count` visits a
/// shared object or a cycle once. All calls together visit at most 2^20 objects plus 8 for each
/// byte of the pickle; after that, `count` returns 0.
class HeldObjects {
 public:
  explicit HeldObjects(const ObjectGraph& graph);

  /// Returns how many objects within `holder` satisfy `wanted`. Does not look inside the objects
  /// that it counts. Returns 0 once the visits are used up.
  std::size_t count(Object holder, bool (*wanted)(Object));

 private:
  template <class Visit>
  static void for_each_part(Object object, const Visit& visit);

  std::uint64_t visits_left_;
  std::uint32_t round_ = 0;
  std::vector<std::uint32_t> round_of_;  // by id: the last count that visited it
};

}  // namespace tessera::formats::pickle
