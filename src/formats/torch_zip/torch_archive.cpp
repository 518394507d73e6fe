#include "formats/torch_zip/torch_archive.h"

#include <algorithm>
#include <array>
#include <functional>
#include <map>
#include <set>
#include <utility>

#include "base/checked_math.h"
#include "base/size_text.h"
#include "formats/pickle/foreign_object.h"
#include "formats/pickle/numpy_array.h"
#include "formats/pickle/plain_value.h"
#include "formats/pickle/unpickler.h"
#include "formats/torch_zip/module_parts.h"
#include "formats/torch_zip/strided_read.h"
#include "formats/torch_zip/tensor_parser.h"

namespace tessera::formats::torch_zip {
namespace {

using pickle::Object;
using pickle::ObjectKind;
using pickle::ValueGlobal;
using pickle::WalkBudget;

constexpr std::uint64_t kMaxPickleNbytes = std::uint64_t{1} << 30;
constexpr std::uint64_t kMaxByteOrderNbytes = 64;

const pickle::AllowList& torchscript_globals() {
  static constexpr pickle::AllowedGlobal kClasses[] = {
      {"__torch__", "*", static_cast<std::uint32_t>(TensorGlobal::torchscript_class)}};
  static const pickle::AllowList allowed{pickle::value_globals(), tensor_globals(), kClasses};
  return allowed;
}

/// Counts the objects `ids` by class, and adds the classes to `counted`.
void count_classes(const pickle::ObjectGraph& graph, const std::set<std::uint32_t>& ids,
                   OpenedClass::As as, std::vector<OpenedClass>& counted) {
  std::map<std::string, std::size_t> num_of_class;
  for (const std::uint32_t id : ids) ++num_of_class[pickle::foreign_name(graph.object(id))];
  for (const auto& [name, num_objects] : num_of_class) counted.push_back({name, as, num_objects});
  std::ranges::stable_sort(counted, {}, &OpenedClass::name);
}

/// Returns a copy of `refusal`. Its text also says how many tensors (`num_tensors`) the refused
/// object holds.
Error with_held(const Error& refusal, std::size_t num_tensors) {
  if (num_tensors == 0) return refusal;
  return Error(refusal.kind(), refusal.where(),
               std::string(refusal.reason()) + "; holds " + std::to_string(num_tensors) +
                   (num_tensors == 1 ? " tensor" : " tensors"));
}

/// Splits a saved object into its leaves (tensors and values).
class Flattener {
 public:
  Flattener(const pickle::ObjectGraph& graph, TensorParser& parser)
      : graph_(graph),
        budget_(graph),
        held_(graph, &TensorParser::is_tensor),
        parser_(parser),
        opened_(graph.num_objects(), Known::no_idea),
        with_tensor_(graph.num_objects(), Known::no_idea),
        is_module_(graph.num_objects(), Known::no_idea) {}

  Leaves flatten(Object root) {
    try {
      visit(root);
    } catch (const Error& error) {
      throw error.at_tensor(spell(path_));
    }
    std::vector<OpenedClass> opened_classes;
    count_classes(graph_, budget_.as_dicts(), OpenedClass::As::dict, opened_classes);
    count_classes(graph_, modules_, OpenedClass::As::module, opened_classes);
    return {std::move(leaves_), std::move(opened_classes), std::move(simplifications_),
            parser_.num_local_tensors()};
  }

 private:
  void visit(Object object) {
    object = without_types(object);
    if (parser_.is_tensor(object)) return add(object, [&] { return parser_.parse(object); });
    if (is_mapping(object)) return visit_mapping(object);
    if (is_module(object)) {
      if (has_packed_weights(object)) return add_packed_module(object);
      return visit_module(object);
    }
    if (TensorParser::is_torchscript_object(object)) return add_packed_object(object);
    const bool is_list = object.is(ObjectKind::list);
    if ((is_list && list_is_opened(object)) ||
        (object.is(ObjectKind::tuple) && holds_tensor(object))) {
      const WalkBudget::Descent descent(budget_, object);
      if (!is_list) note_simplification(object, Simplification::Kind::tuple);
      const std::size_t num_items = object.num_items("items");
      for (std::size_t i = 0; i < num_items; ++i) {
        path_.emplace_back(static_cast<std::int64_t>(i));
        visit(object.item(i));
        path_.pop_back();
      }
      return;
    }
    const bool is_read = pickle::generator_state(object).has_value();
    if (pickle::is_foreign(object) && !is_read) {  // to_value would throw, which is slower
      return add_refused(object, object.error(ErrorKind::unsupported, in_words(object)));
    }
    add(object, [&] {
      Value value = pickle::to_value(object, budget_);
      note_plainer(object);
      return value;
    });
  }

  /// Records which types in a value or a key were read as plainer types, such as a frozenset as a
  /// set, and which attributes the dicts in it had.
  void note_plainer(Object object) {
    const std::set<std::string_view> types = budget_.take_plainer();
    if (!types.empty()) {
      note_simplification(object, Simplification::Kind::value_type, {types.begin(), types.end()});
    }
    std::set<std::string> attributes;
    for (const Object state : budget_.take_states()) {
      std::vector<std::string> names;
      add_attribute_names(state, names);
      attributes.insert(names.begin(), names.end());
    }
    note_attributes(object, {attributes.begin(), attributes.end()});
  }

  void visit_mapping(Object object) {
    const bool is_as_dict = pickle::is_foreign(object) && budget_.is_on_path(object);
    if (is_as_dict) return add_reference_back(object);
    const WalkBudget::Descent descent(budget_, object);
    const Object entries = entries_of(object);
    if (pickle::is_foreign(object)) budget_.note_as_dict(object);
    const std::size_t num_entries = entries.num_entries("entries");
    if (const auto refusal = refusal_of_keys(entries)) return add_refused(object, *refusal);
    if (pickle::is_dict_class(object)) {
      note_simplification(object, Simplification::Kind::dict_class);
      std::vector<std::string> names;
      if (const auto state = object.call_state("dict")) add_attribute_names(*state, names);
      note_attributes(object, std::move(names));
    }
    // An empty dict becomes a value, unless it is the whole saved object, which has no name.
    if (num_entries == 0 && path_.empty()) return;
    if (num_entries == 0) return add(object, [] { return Value(Value::Dict{}); });
    note_plainer(object);  // types in the keys
    for (std::size_t i = 0; i < num_entries; ++i) {
      path_.push_back(key_for(entries.entry_key(i)));
      budget_.take_plainer();
      visit(entries.entry_value(i));
      path_.pop_back();
    }
  }

  void note_simplification(Object object, Simplification::Kind kind,
                           std::vector<std::string> what = {}) {
    budget_.spend(object, 64 + kNameNbytes * what.size());
    simplifications_.push_back({kind, spell(path_), std::move(what)});
    budget_.spend(object, simplifications_.back().name.size());
  }

  /// Records the names of attributes that a program set on `object`, such as the `_metadata` of a
  /// state_dict().
  void note_attributes(Object object, std::vector<std::string> names) {
    if (names.empty()) return;
    note_simplification(object, Simplification::Kind::attributes, std::move(names));
  }

  /// Visits what a module's state_dict() would return: its parameters and buffers, then those of
  /// the modules in it.
  void visit_module(Object object) {
    if (budget_.is_on_path(object)) return add_reference_back(object);
    const WalkBudget::Descent descent(budget_, object);
    budget_.spend(object, 16 * object.call_state("module")->num_entries("module"));
    const ModuleParts parts = *module_parts(object);
    const bool is_outermost = !std::exchange(is_in_module_, true);
    const std::size_t num_leaves = leaves_.size();
    const Names names = is_outermost ? Names::of_their_own : Names::behind_the_module;
    visit_entries(parts.parameters, names, {});
    visit_entries(parts.buffers, names, parts.transient_buffers);
    visit_entries(parts.modules, names, {});
    note_attributes(object, attributes_with_tensors(object));
    if (!is_outermost) return;
    is_in_module_ = false;
    modules_.insert(object.id());
    if (leaves_.size() == num_leaves && !path_.empty()) add_leaf(object, Value(Value::Dict{}));
  }

  /// Returns the names of a module's other attributes that hold tensors, or objects of C++, which
  /// may hold some.
  std::vector<std::string> attributes_with_tensors(Object module) {
    constexpr std::size_t kMaxNameNbytes = 80;
    // The last one lists the parameters of nn.LSTM and nn.GRU again.
    constexpr std::array<std::string_view, 4> kParts{"_parameters", "_buffers", "_modules",
                                                     "_flat_weights"};
    const Object state = *module.call_state("module");
    std::vector<std::string> names;
    for (std::size_t i = 0; i < state.num_entries("module"); ++i) {
      const Object key = state.entry_key(i);
      const Object value = state.entry_value(i);
      if (!key.is(ObjectKind::str)) continue;
      const std::string_view name = key.as_text("attribute");
      if (std::ranges::find(kParts, name) != kParts.end()) continue;
      const bool is_noted = held_.is_or_holds(value) || is_script_object(value);
      if (is_noted) names.push_back(printable(name, kMaxNameNbytes));
    }
    return names;
  }

  /// Whether an entry of a module gets a key of its own in the key path, or its name is appended to
  /// the last key. As in a state_dict(), names inside of a module are joined: `encoder.0.weight` is
  /// one key.
  enum class Names { of_their_own, behind_the_module };

  /// Visits the entries of a module's dict that are not None and not in `left_out`.
  void visit_entries(Object entries, Names names, std::span<const std::string_view> left_out) {
    const std::size_t num_entries = entries.num_entries("entries");
    for (std::size_t i = 0; i < num_entries; ++i) {
      const Object key = entries.entry_key(i);
      const Object value = entries.entry_value(i);
      const bool is_left_out = key.is(ObjectKind::str) &&
                               std::ranges::find(left_out, key.as_text("key")) != left_out.end();
      if (is_left_out || value.is(ObjectKind::none)) continue;
      if (names == Names::of_their_own) {
        path_.push_back(key_for(key));
        visit(value);
        path_.pop_back();
      } else {
        const Key outer = path_.back();
        path_.back() = spell({outer, key_for(key)});
        visit(value);
        path_.back() = outer;
      }
    }
  }

  void add_reference_back(Object object) {
    add(object, [&]() -> Value { pickle::refuse_reference_back(object); });
  }

  /// Adds a leaf with the result of `read`, or with the Error(unsupported) that `read` throws.
  template <class Read>
  void add(Object object, const Read& read) {
    try {
      add_leaf(object, read());
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::unsupported) throw;
      add_refused(object, error);
    }
  }

  static std::string in_words(Object foreign) {
    const bool is_module = pickle::foreign_name(foreign).starts_with("torch.nn.");
    return pickle::foreign_in_words(foreign) + "; nothing was executed" +
           (is_module ? " (a module? save its state_dict())" : "");
  }

  void add_refused(Object object, const Error& error) {
    constexpr std::uint64_t kErrorNbytes = 512;
    budget_.take_plainer();  // forget what was read before the error
    budget_.take_states();
    budget_.spend(object, kErrorNbytes);
    const bool is_tensor = parser_.is_tensor(object);
    const std::size_t num_tensors = is_tensor ? 0 : held_.count(object);
    add_leaf(object, with_held(error, num_tensors));
  }

  /// Returns an error if a key of the dict cannot be part of a name, such as an object of a class.
  /// The dict can then not be opened.
  std::optional<Error> refusal_of_keys(Object entries) {
    const std::size_t num_entries = entries.num_entries("entries");
    for (std::size_t i = 0; i < num_entries; ++i) {
      const Object key = entries.entry_key(i);
      if (key.is(ObjectKind::str) || key.is(ObjectKind::integer)) continue;
      try {
        pickle::to_key(key, budget_);
      } catch (const Error& error) {
        if (error.kind() != ErrorKind::unsupported) throw;
        return key.error(ErrorKind::unsupported,
                         "dict with the key " + key.describe() + "; nothing was executed");
      }
    }
    return std::nullopt;
  }

  void add_leaf(Object object, std::variant<TensorRecord, Value, Error> content) {
    std::uint64_t path_nbytes = 128;
    for (const auto& key : path_) {
      const auto* text = std::get_if<std::string>(&key);
      const auto* other = std::get_if<NonStringKey>(&key);
      path_nbytes += 40 + (text != nullptr    ? text->size()
                           : other != nullptr ? other->json.size()
                                              : 0);
    }
    if (const auto* tensor = std::get_if<TensorRecord>(&content)) {
      path_nbytes += kNameNbytes * tensor->attributes.size();
    }
    budget_.spend(object, path_nbytes);
    leaves_.push_back({.path = path_, .content = std::move(content)});
  }

  static Object without_types(Object object) {
    for (int depth = 0; depth < WalkBudget::kMaxDepth; ++depth) {
      if (!object.is(ObjectKind::call) || value_global(object) != ValueGlobal::torch_typed) break;
      const Object arguments = object.call_arguments("typed container");
      if (arguments.num_items("arguments") == 0) object.fail_expected("arguments", "a container");
      object = arguments.item(0);
    }
    return object;
  }

  static std::optional<Object> attributes_of_torchscript(Object object) {
    if (!TensorParser::is_torchscript_object(object)) return std::nullopt;
    const std::optional<Object> state = object.call_state("TorchScript object");
    return state && state->is(ObjectKind::dict) ? state : std::nullopt;
  }

  void add_packed_object(Object object) {
    add_refused(object, object.error(ErrorKind::unsupported,
                                     object.describe() +
                                         ": expected a TorchScript module with attributes, found a "
                                         "packed object (quantized?)"));
  }

  void add_packed_module(Object module) {
    add_refused(module, module.error(ErrorKind::unsupported,
                                     pickle::foreign_in_words(module) +
                                         ", a quantized module: what its state_dict() returns is "
                                         "not among its parameters and buffers; nothing was "
                                         "executed"));
  }

  static bool is_mapping(Object object) {
    if (object.is(ObjectKind::dict) || pickle::is_dict_class(object)) return true;
    return object.is(ObjectKind::call) && (attributes_of_torchscript(object).has_value() ||
                                           pickle::entries_as_dict(object).has_value());
  }

  /// Returns the object that holds a mapping's entries: the mapping itself, or a dict within it.
  static Object entries_of(Object mapping) {
    if (mapping.is(ObjectKind::dict)) return mapping;
    if (const auto entries = pickle::entries_as_dict(mapping)) return *entries;
    if (const auto attributes = attributes_of_torchscript(mapping)) return *attributes;
    if (value_global(mapping) == ValueGlobal::counter) {
      const Object arguments = mapping.call_arguments("Counter");
      if (arguments.num_items("arguments") > 0) return arguments.item(0);
    }
    return mapping;
  }

  /// Returns a key of a dict as a key for a key path. A frozenset becomes a text.
  Key key_for(Object key) {
    if (key.is(pickle::ObjectKind::str)) key.as_str("key");  // throws if it cannot be a name
    const Value value = pickle::to_key(key, budget_);
    return dict_key(value).value_or(value_to_string(value));
  }

  static constexpr std::uint64_t kNameNbytes = 128;  // of an attribute, at most

  enum class Known : std::uint8_t { no_idea, no, yes };

  bool list_is_opened(Object list) {
    return remember(opened_, list, [&](Object item) {
      if (parser_.is_tensor(item) || is_mapping(item) || is_module(item)) return true;
      if (item.is(ObjectKind::list)) return list_is_opened(item);
      return item.is(ObjectKind::tuple) && holds_tensor(item);
    });
  }

  bool holds_tensor(Object object) {
    if (parser_.is_tensor(object) || is_module(object)) return true;
    if (is_mapping(object)) {
      const Object entries = entries_of(object);
      const bool is_within = budget_.is_on_path(object) || budget_.is_on_path(entries);
      if (pickle::is_foreign(object) && is_within) return false;
      return remember(with_tensor_, entries, [&](Object value) { return holds_tensor(value); });
    }
    if (!object.is(ObjectKind::list) && !object.is(ObjectKind::tuple)) return false;
    return remember(with_tensor_, object, [&](Object item) { return holds_tensor(item); });
  }

  /// Returns whether `wanted` is true for any item of a container (for a dict: any value).
  /// Remembers the result, because several objects may refer to the same container.
  template <class Wanted>
  bool remember(std::vector<Known>& known, Object container, const Wanted& wanted) {
    Known& answer = known[container.id()];
    if (answer != Known::no_idea) return answer == Known::yes;
    const WalkBudget::Descent descent(budget_, container);
    const bool is_dict = container.is(ObjectKind::dict) || container.is(ObjectKind::call);
    const std::size_t size =
        is_dict ? container.num_entries("entries") : container.num_items("items");
    bool any = false;
    for (std::size_t i = 0; i < size && !any; ++i) {
      any = wanted(without_types(is_dict ? container.entry_value(i) : container.item(i)));
    }
    answer = any ? Known::yes : Known::no;
    return any;
  }

  bool is_module(Object object) {
    if (!object.is(ObjectKind::call)) return false;
    Known& answer = is_module_[object.id()];
    if (answer == Known::no_idea) answer = module_parts(object) ? Known::yes : Known::no;
    return answer == Known::yes;
  }

  const pickle::ObjectGraph& graph_;
  WalkBudget budget_;
  pickle::HeldObjects held_;
  TensorParser& parser_;
  KeyPath path_;  // of the visited object, also during an exception
  std::vector<Leaf> leaves_;
  std::vector<Simplification> simplifications_;
  std::vector<Known> opened_;       // indexed by id
  std::vector<Known> with_tensor_;  // indexed by id
  std::vector<Known> is_module_;    // indexed by id
  bool is_in_module_ = false;
  std::set<std::uint32_t> modules_;  // ids of the outermost modules
};

struct OtherArchive {
  std::string_view name;
  std::string_view advice;
};

/// Returns which other function of torch wrote an archive, such as torch.export. Each kind has a
/// member that no other archive has.
std::optional<OtherArchive> archive_of_another_kind(const zip::ZipReader& zip) {
  constexpr OtherArchive kExported{
      "an exported program (.pt2)",
      "torch.export.load it, and torch.save the state_dict of the program"};
  constexpr OtherArchive kPackage{
      "an archive of torch.package",
      "load what it holds with torch.package.PackageImporter, and torch.save that"};
  const auto in_folder = [](std::string_view name, std::string_view end) {
    return name.ends_with(end) && name.find('/') == name.size() - end.size();
  };
  for (const zip::Member& member : zip.members()) {
    const std::string_view name = member.name;
    if (in_folder(name, "/archive_format") || name == "archive_format" ||
        name == "serialized_exported_program.json") {
      return kExported;
    }
    const std::size_t slash = std::min(name.find('/'), name.size());
    if (name.substr(slash) == "/.data/extern_modules") return kPackage;
  }
  return std::nullopt;
}

/// Applies the tensor's conjugate and negative bits to its elements, by flipping signs. Requires: a
/// floating-point or complex dtype.
void apply_signs(const TensorRecord& tensor, std::span<std::byte> out) {
  const bool is_pair = is_complex(tensor.dtype);
  const std::size_t number_nbytes = itemsize(tensor.dtype) / (is_pair ? 2 : 1);
  for (std::size_t i = 0; i * number_nbytes < out.size(); ++i) {
    const bool is_imaginary = is_pair && i % 2 == 1;
    if (tensor.negative != (tensor.conjugate && is_imaginary)) {
      out[(i + 1) * number_nbytes - 1] ^= std::byte{0x80};
    }
  }
}

std::uint64_t num_stored_elements(const TensorRecord& tensor) {
  std::int64_t reach = 1;
  for (std::size_t i = 0; i < tensor.shape.size(); ++i) {
    reach += (tensor.shape[i] - 1) * tensor.strides[i];
  }
  return static_cast<std::uint64_t>(reach);
}

/// Reverses the bytes of each number, for files that a big-endian machine wrote.
void swap_bytes(DType dtype, std::span<std::byte> elements) {
  const std::size_t number_nbytes = itemsize(dtype) / (is_complex(dtype) ? 2 : 1);
  for (std::size_t i = 0; i < elements.size(); i += number_nbytes) {
    std::ranges::reverse(elements.subspan(i, number_nbytes));
  }
}

/// The members `<prefix>/data/<key>` of an archive.
class ZipStorages final : public Storages {
 public:
  ZipStorages(const ReadableFile& file, ByteRange window) : zip_(file, window) {
    const std::uint64_t nbytes = zip_.nbytes_before();
    if (nbytes == 0) return;
    // The bytes before the archive may be another checkpoint. PyTorch refuses such a file too.
    throw Error::expected(
        ErrorKind::corruption,
        {.path = file.path(), .byte_range = ByteRange{window.begin, window.begin + nbytes}},
        "zip archive", "nothing before the archive", counted(nbytes, "byte"),
        "several torch.save calls into one file?");
  }

  const zip::ZipReader& zip() const { return zip_; }
  void set_prefix(std::string_view prefix) { prefix_ = prefix; }

  std::optional<std::size_t> find(std::string_view key) const override {
    return zip_.find(name_of(key));
  }
  std::string name_of(std::string_view key) const override {
    return prefix_ + "/data/" + std::string(key);
  }
  std::string name(std::size_t storage) const override {
    return std::string(zip_.members()[storage].name);
  }
  std::uint64_t nbytes(std::size_t storage) const override {
    return zip_.members()[storage].nbytes;
  }
  bool is_plain(std::size_t storage) const override {
    return zip_.members()[storage].compression == zip::Compression::stored;
  }
  std::uint64_t plain_nbytes() const override {
    std::uint64_t nbytes = 0;
    for (const zip::Member& member : zip_.members()) {
      if (member.compression == zip::Compression::stored) nbytes += member.nbytes;
    }
    return nbytes;
  }
  std::optional<std::uint32_t> crc32(std::size_t storage) const override {
    const zip::Member& member = zip_.members()[storage];
    return member.has_crc() ? std::optional(member.crc32) : std::nullopt;
  }
  ByteRange data_range(std::size_t storage) const override { return zip_.data_range(storage); }
  void read_at(std::size_t storage, std::uint64_t offset, std::span<std::byte> out) const override {
    zip_.read_at(storage, offset, out);
  }

 private:
  zip::ZipReader zip_;
  std::string prefix_;
};

}  // namespace

const pickle::AllowList& saved_globals() {
  static const pickle::AllowList allowed{pickle::value_globals(), tensor_globals()};
  return allowed;
}

bool is_contiguous(const TensorRecord& tensor) {
  if (numel_of(tensor.shape) == 0) return true;
  const Shape row_major = row_major_strides(tensor.shape);
  for (std::size_t i = 0; i < tensor.shape.size(); ++i) {
    if (tensor.shape[i] != 1 && tensor.strides[i] != row_major[i]) return false;
  }
  return true;
}

namespace {

using Refuse = std::function<void(ErrorKind kind, std::string_view rule, std::string_view expected,
                                  std::string_view found, std::string_view likely_cause)>;

/// Returns the index of the member `<prefix>/data.pkl`. Throws if there is none, or several.
std::size_t find_pickle(const zip::ZipReader& zip, const Refuse& refuse) {
  constexpr std::string_view kPickleName = "/data.pkl";
  if (const auto other = archive_of_another_kind(zip)) {
    refuse(ErrorKind::unsupported, "archive", "a torch.save file", other->name, other->advice);
  }
  std::optional<std::size_t> pickle_member;
  for (std::size_t i = 0; i < zip.members().size(); ++i) {
    const std::string_view name = zip.members()[i].name;
    if (!name.ends_with(kPickleName) || name.find('/') != name.size() - kPickleName.size())
      continue;
    if (pickle_member) {
      refuse(ErrorKind::corruption, "archive", "one data.pkl", "two data.pkl in different folders",
             "two archives in one?");
    }
    pickle_member = i;
  }
  if (!pickle_member) {
    refuse(ErrorKind::unsupported, "archive", "a member <name>/data.pkl", "none",
           "a zip file that torch.save did not write?");
  }
  return *pickle_member;
}

/// Returns whether the member `byteorder` states that a big-endian machine wrote the storages.
bool is_big_endian(const zip::ZipReader& zip, const std::string& prefix, const Refuse& refuse) {
  const auto member = zip.find(prefix + "/byteorder");
  if (!member) return false;
  const std::vector<char> order = zip.read_all(*member, kMaxByteOrderNbytes);
  const std::string_view name(order.data(), order.size());
  if (name != "little" && name != "big") {
    refuse(ErrorKind::corruption, "byteorder", "little or big", printable(name), "");
  }
  return name == "big";
}

}  // namespace

TorchArchive::TorchArchive(const ReadableFile& file, ByteRange window,
                           std::span<const std::string> as_dict) {
  auto storages = std::make_unique<ZipStorages>(file, window);
  const zip::ZipReader& zip = storages->zip();
  zip_ = &zip;
  const Refuse refuse = [&](ErrorKind kind, std::string_view rule, std::string_view expected,
                            std::string_view found, std::string_view likely_cause) {
    throw Error::expected(kind, {.path = zip.path(), .byte_range = window}, rule, expected, found,
                          likely_cause);
  };
  const std::size_t pickle_member = find_pickle(zip, refuse);
  const std::string_view name = zip.members()[pickle_member].name;
  prefix_ = name.substr(0, name.find('/'));
  storages->set_prefix(prefix_);
  const bool is_torchscript = zip.find(prefix_ + "/constants.pkl").has_value();
  const ByteOrder order = is_big_endian(zip, prefix_, refuse) ? ByteOrder::big : ByteOrder::little;
  take(zip.path(),
       pickle::unpickle(zip.read_all(pickle_member, kMaxPickleNbytes),
                        {.path = zip.path(), .file_offset = zip.data_range(pickle_member).begin},
                        is_torchscript ? torchscript_globals() : saved_globals(),
                        {.policy = pickle::ForeignGlobals::Policy::record, .as_dict = as_dict}),
       std::move(storages), order);
}

void SavedObject::take(std::string path, pickle::ObjectGraph graph,
                       std::unique_ptr<Storages> storages, ByteOrder order) {
  path_ = std::move(path);
  graph_ = std::move(graph);
  storages_ = std::move(storages);
  order_ = order;
}

Leaves SavedObject::flatten() const {
  TensorParser parser(*storages_);
  return Flattener(*graph_, parser).flatten(graph_->root());
}

std::vector<std::string> SavedObject::foreign_names() const {
  constexpr std::size_t kMaxNames = 1000;
  return pickle::foreign_names(*graph_, kMaxNames);
}

std::unordered_set<std::string_view> SavedObject::storage_keys() const {
  constexpr std::size_t kPlaceOfKey = 2;  // in ('storage', type, key, location, numel)
  std::unordered_set<std::string_view> keys;
  for (std::size_t id = 0; id < graph_->num_objects(); ++id) {
    const Object object = graph_->object(id);
    if (!object.is(ObjectKind::persistent)) continue;
    const Object items = object.persistent_id("storage");
    if (!items.is(ObjectKind::tuple) || items.num_items("storage id") <= kPlaceOfKey) continue;
    const Object key = items.item(kPlaceOfKey);
    if (key.is(ObjectKind::str)) keys.insert(key.as_text("storage key"));
  }
  return keys;
}

Value SavedObject::as_value() const {
  WalkBudget budget(*graph_);
  const Object object = graph_->root();
  try {
    return pickle::to_value(object, budget);
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::unsupported || TensorParser::is_tensor(object)) throw;
    pickle::HeldObjects held(*graph_, &TensorParser::is_tensor);
    throw with_held(error, held.count(object));
  }
}

std::vector<OpenedClass> SavedObject::classes_in_value() const {
  WalkBudget budget(*graph_);
  pickle::to_value(graph_->root(), budget);
  std::vector<OpenedClass> opened_classes;
  count_classes(*graph_, budget.as_dicts(), OpenedClass::As::dict, opened_classes);
  return opened_classes;
}

void SavedObject::read_elements(const TensorRecord& tensor, std::string_view fqn, FlatRange range,
                                std::span<std::byte> out) const {
  const std::uint64_t element_nbytes = itemsize(tensor.dtype);
  TESSERA_CHECK(out.size() == static_cast<std::uint64_t>(range.numel()) * element_nbytes);
  if (out.empty()) return;
  const auto read = [&](std::uint64_t begin, std::span<std::byte> bytes) {
    storages_->read_at(tensor.storage, begin, bytes);
    checks_->add(*storages_, path_, tensor.storage, begin, bytes);
  };
  try {
    if (is_contiguous(tensor)) {
      const std::uint64_t begin =
          static_cast<std::uint64_t>(tensor.storage_offset + range.begin) * element_nbytes;
      read(begin, out);
    } else {
      read_strided(tensor, range, out, read);
    }
  } catch (const Error& error) {
    throw error.at_tensor(std::string(fqn));
  }
  if (order_ == ByteOrder::big) swap_bytes(tensor.dtype, out);
  if (tensor.conjugate || tensor.negative) apply_signs(tensor, out);
}

ByteRange SavedObject::stored_range(const TensorRecord& tensor) const {
  if (numel_of(tensor.shape) == 0) return {};
  const std::uint64_t element_nbytes = itemsize(tensor.dtype);
  const std::uint64_t begin = storages_->data_range(tensor.storage).begin +
                              static_cast<std::uint64_t>(tensor.storage_offset) * element_nbytes;
  return {begin, begin + num_stored_elements(tensor) * element_nbytes};
}

}  // namespace tessera::formats::torch_zip
