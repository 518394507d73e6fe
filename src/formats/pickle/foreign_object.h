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

/// Looks for objects of one kind (`wanted`) that other objects hold, at any depth. Does not look
/// inside the objects that it finds. All calls together visit at most 2^20 objects plus 8 for each
/// byte of the pickle.
class HeldObjects {
 public:
  HeldObjects(const ObjectGraph& graph, bool (*wanted)(Object));

  /// Returns how many wanted objects `holder` holds. Visits a shared object or a cycle once.
  /// Returns 0 once the visits are used up.
  std::size_t count(Object holder);
  /// Returns whether `object` is a wanted object or holds one. Remembers which objects hold none,
  /// so all calls together visit these once. Once the visits are used up, returns true: `object`
  /// may hold one.
  bool is_or_holds(Object object);

 private:
  enum class Holds : std::uint8_t { unknown, none, some };
  enum class Step : std::uint8_t { look_inside, pass_by, stop };

  template <class Visit>
  static void for_each_part(Object object, const Visit& visit);
  template <class Decide>
  bool walk(Object start, const Decide& decide);

  bool (*wanted_)(Object);
  std::uint64_t visits_left_;
  std::uint32_t round_ = 0;
  std::vector<std::uint32_t> round_of_;   // by id: the last call that visited it
  std::vector<Holds> holds_;              // by id
  std::vector<std::uint32_t> holder_of_;  // by id, of this round: the object that led to it
  std::vector<std::uint32_t> visited_;    // ids, of this round
};

}  // namespace tessera::formats::pickle
