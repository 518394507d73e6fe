#include "formats/pickle/foreign_object.h"

#include <algorithm>
#include <set>
#include <string_view>
#include <utility>

#include "formats/pickle/numpy_array.h"
#include "formats/pickle/unpickler.h"

namespace tessera::formats::pickle {
namespace {

// Functions whose first argument is the class of the object that they make.
constexpr std::pair<std::string_view, std::string_view> kMakers[] = {
    {"copyreg", "_reconstructor"},
    {"copy_reg", "_reconstructor"},
    {"copyreg", "__newobj__"},
    {"copyreg", "__newobj_ex__"},
};

// Modules whose objects are pickled as calls of their class. Such a call is an object, and is not
// reported as a function call.
constexpr std::string_view kModulesOfClasses[] = {"collections", "datetime", "decimal", "fractions",
                                                  "numpy",       "pathlib",  "uuid",    "zoneinfo"};
constexpr std::string_view kBuiltinClasses[] = {"range", "xrange", "slice"};

/// Says whether `module` is `parent` or a submodule of it.
bool is_within(std::string_view module, std::string_view parent) {
  return module.starts_with(parent) &&
         (module.size() == parent.size() || module[parent.size()] == '.');
}

// Returns `module.name`, as Python 3 spells it: pickles of protocol 2 and below call the builtins
// module, and range, by their Python 2 names.
std::string dotted_name(Object global) {
  const std::string_view module = global.global_module("global");
  const std::string_view name = global.global_name("global");
  if (module != "__builtin__") return printable(module, 100) + "." + printable(name, 100);
  return "builtins." + (name == "xrange" ? "range" : printable(name, 100));
}

/// Returns the class of an object that a function of `copyreg` makes.
std::optional<Object> class_given_to_maker(Object call) {
  if (!call.is(ObjectKind::call)) return std::nullopt;
  const std::pair maker(call.global_module("call"), call.global_name("call"));
  if (std::ranges::find(kMakers, maker) == std::end(kMakers)) return std::nullopt;
  const Object arguments = call.call_arguments("call");
  if (arguments.num_items("arguments") == 0) return std::nullopt;
  const Object first = arguments.item(0);
  return first.is(ObjectKind::global) ? std::optional(first) : std::nullopt;
}

}  // namespace

bool is_foreign(Object object) {
  return (object.is(ObjectKind::call) || object.is(ObjectKind::global)) &&
         object.meaning("global") <= kAsDictMeaning;
}

std::string foreign_name(Object object) {
  return dotted_name(class_given_to_maker(object).value_or(object));
}

std::string foreign_in_words(Object object) {
  if (object.is(ObjectKind::global)) return "class or function " + foreign_name(object);
  if (object.meaning("global") == kAsDictMeaning && !entries_as_dict(object)) {
    return "object of class " + foreign_name(object) + ", whose state is no dict";
  }
  if (std::string array = numpy_array_in_words(object); !array.empty()) return array;
  const bool is_object = object.is_instance() || class_given_to_maker(object).has_value();
  return (is_object ? "object of class " : "call of ") + foreign_name(object);
}

bool is_foreign_function_call(Object object) {
  if (!object.is(ObjectKind::call) || !is_foreign(object) || object.is_instance() ||
      class_given_to_maker(object)) {
    return false;
  }
  const std::string_view module = object.global_module("call");
  if (module == "builtins" || module == "__builtin__") {
    return std::ranges::find(kBuiltinClasses, object.global_name("call")) ==
           std::end(kBuiltinClasses);
  }
  return std::ranges::none_of(kModulesOfClasses,
                              [&](std::string_view known) { return is_within(module, known); });
}

std::optional<Object> entries_as_dict(Object object) {
  if (!object.is(ObjectKind::call) || object.meaning("class") != kAsDictMeaning ||
      object.call_arguments("class").num_items("arguments") != 0 ||
      object.num_appended("class") != 0) {
    return std::nullopt;
  }
  const std::optional<Object> state = object.call_state("class");
  if (!state || state->is(ObjectKind::none)) return object;
  if (state->is(ObjectKind::dict) && object.num_entries("class") == 0) return state;
  return std::nullopt;
}

std::vector<std::string> foreign_names(const ObjectGraph& graph, std::size_t max_names) {
  std::set<std::string> names;
  for (std::size_t id = 0; id < graph.num_objects() && names.size() < max_names; ++id) {
    const Object object = graph.object(id);
    if (object.is(ObjectKind::global) && is_foreign(object)) names.insert(dotted_name(object));
  }
  return {names.begin(), names.end()};
}

HeldObjects::HeldObjects(const ObjectGraph& graph, bool (*wanted)(Object))
    : wanted_(wanted),
      visits_left_((std::uint64_t{1} << 20) + 8 * std::uint64_t{graph.nbytes()}),
      round_of_(graph.num_objects()),
      holds_(graph.num_objects(), Holds::unknown),
      holder_of_(graph.num_objects()) {}

template <class Visit>
void HeldObjects::for_each_part(Object object, const Visit& visit) {
  switch (object.kind()) {
    case ObjectKind::list:
    case ObjectKind::tuple:
    case ObjectKind::set:
      for (std::size_t i = 0; i < object.num_items("items"); ++i) visit(object.item(i));
      return;
    case ObjectKind::call:
      visit(object.call_arguments("call"));
      if (const auto state = object.call_state("call")) visit(*state);
      for (std::size_t i = 0; i < object.num_appended("call"); ++i) visit(object.appended(i));
      [[fallthrough]];
    case ObjectKind::dict:
      for (std::size_t i = 0; i < object.num_entries("entries"); ++i) {
        visit(object.entry_key(i));
        visit(object.entry_value(i));
      }
      return;
    default:
      return;
  }
}

/// Visits `start` and what it holds, each object once, and does with each what `decide(object)`
/// says. Returns false if the visits are used up.
template <class Decide>
bool HeldObjects::walk(Object start, const Decide& decide) {
  ++round_;
  round_of_[start.id()] = round_;
  holder_of_[start.id()] = start.id();
  visited_.assign(1, start.id());
  std::vector<Object> open{start};
  while (!open.empty()) {
    const Object object = open.back();
    open.pop_back();
    const Step step = decide(object);
    if (step == Step::stop) return true;
    if (step == Step::pass_by) continue;
    if (visits_left_ == 0) return false;
    for_each_part(object, [&](Object part) {
      if (visits_left_ > 0) --visits_left_;
      if (std::exchange(round_of_[part.id()], round_) == round_) return;
      holder_of_[part.id()] = object.id();
      visited_.push_back(part.id());
      open.push_back(part);
    });
  }
  return true;
}

std::size_t HeldObjects::count(Object holder) {
  std::size_t num_found = 0;
  const bool is_whole = walk(holder, [&](Object object) {
    if (object == holder || !wanted_(object)) return Step::look_inside;
    ++num_found;
    return Step::pass_by;
  });
  return is_whole ? num_found : 0;
}

bool HeldObjects::is_or_holds(Object object) {
  bool is_found = false;
  const bool is_whole = walk(object, [&](Object next) {
    if (holds_[next.id()] == Holds::none) return Step::pass_by;
    if (holds_[next.id()] == Holds::unknown && !wanted_(next)) return Step::look_inside;
    for (std::uint32_t id = next.id(); holder_of_[id] != id;) {
      id = holder_of_[id];
      holds_[id] = Holds::some;
    }
    is_found = true;
    return Step::stop;
  });
  if (is_found || !is_whole) return true;
  for (const std::uint32_t id : visited_) holds_[id] = Holds::none;
  return false;
}

}  // namespace tessera::formats::pickle
