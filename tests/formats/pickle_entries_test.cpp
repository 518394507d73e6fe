#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "formats/pickle/fetched_slots.h"
#include "formats/pickle/pickle_bytes.h"
#include "formats/pickle/pickler.h"
#include "formats/pickle/unpickler.h"
#include "support/error_matchers.h"
#include "tessera/base/file_system.h"

// Shows A3, E3. Entries of large dicts are taken while a pickle is read. [Note: Entries taken
// early]
namespace tessera::formats::pickle {
namespace {

using test::ThrowsError;
using testing::ElementsAre;

constexpr AllowedGlobal kGlobals[] = {{"m", "Root", 0x900}, {"m", "Item", 0x901}};

/// Takes the entries of the attribute `items`: each key, with the attribute `n` of the value.
class Recorder final : public EntryTaker {
 public:
  bool wants(Object root, std::string_view name, Object /*dict*/) override {
    return root.meaning("root") == 0x900 && name == "items";
  }
  void take(Object key, Object value) override {
    const auto state = value.call_state("item");
    const auto number = state ? state->find("n") : std::nullopt;
    entries.emplace_back(key.as_str("key"), number ? number->as_integer("n") : -1);
  }

  std::vector<std::pair<std::string, std::int64_t>> entries;
};

ObjectGraph read(std::string_view pickle, EntryTaker* taker, PickleLimits limits = {}) {
  static const AllowList allowed{kGlobals};
  return unpickle({pickle.begin(), pickle.end()}, {.path = "x.pkl"}, allowed,
                  {.policy = ForeignGlobals::Policy::record}, limits, taker);
}

void begin_object(Pickler& p, std::string_view name) {
  p.global("m", name);
  p.empty_tuple();
  p.new_object();
  p.empty_dict();
  p.mark();
}

void end_object(Pickler& p) {
  p.set_items_from_mark();
  p.build();
}

void item(Pickler& p, std::int64_t n) {
  begin_object(p, "Item");
  p.interned("n");
  p.integer(n);
  end_object(p);
}

/// Returns a pickle of a root whose attribute `items` gets what `fill` pushes between a MARK and
/// SETITEMS. `after` pushes further attributes.
std::string root_with(const std::function<void(Pickler&)>& fill,
                      const std::function<void(Pickler&)>& after = {}) {
  Pickler p(4);
  begin_object(p, "Root");
  p.interned("items");
  p.empty_dict();
  p.mark();
  fill(p);
  p.set_items_from_mark();
  if (after) after(p);
  end_object(p);
  return std::move(p).finish();
}

Object attribute(const ObjectGraph& graph, std::string_view name) {
  return *graph.root().call_state("root")->find(name);
}

TEST(PickleEntriesTest, EachEntryIsTakenAndItsObjectsAreDropped) {
  const std::string pickle = root_with([](Pickler& p) {
    for (int i = 0; i < 1000; ++i) {
      p.text("k" + std::to_string(i));
      item(p, i);
    }
  });
  Recorder recorder;
  const ObjectGraph graph = read(pickle, &recorder);
  ASSERT_EQ(recorder.entries.size(), 1000u);
  for (int i = 0; i < 1000; ++i) {
    EXPECT_EQ(recorder.entries[static_cast<std::size_t>(i)],
              (std::pair<std::string, std::int64_t>("k" + std::to_string(i), i)));
  }
  EXPECT_EQ(attribute(graph, "items").num_entries("items"), 0u);
  EXPECT_LT(graph.num_objects(), 30u);
  EXPECT_GT(read(pickle, nullptr).num_objects(), 3000u);
}

TEST(PickleEntriesTest, TakenEntriesDoNotCountAsObjects) {
  const std::string pickle = root_with([](Pickler& p) {
    for (int i = 0; i < 3000; ++i) {
      if (i > 0 && i % 1000 == 0) {  // a batch of its own, as Python's pickler writes them
        p.set_items_from_mark();
        p.mark();
      }
      p.text("k" + std::to_string(i));
      item(p, i);
    }
  });
  Recorder recorder;
  read(pickle, &recorder, {.max_objects = 100});
  EXPECT_EQ(recorder.entries.size(), 3000u);
  EXPECT_THAT([&] { read(pickle, nullptr, {.max_objects = 3000}); },
              ThrowsError(ErrorKind::corruption, "objects in one pickle"));
}

TEST(PickleEntriesTest, WhatALaterOpcodeFetchesCounts) {
  std::vector<std::size_t> slots;
  const std::string pickle = root_with(
      [&](Pickler& p) {
        for (int i = 0; i < 200; ++i) {
          p.text("k" + std::to_string(i));
          begin_object(p, "Item");
          p.interned("shape");
          p.mark();
          for (int k = 0; k < 4; ++k) p.integer(k);
          p.tuple_from_mark();
          slots.push_back(p.memoize());
          end_object(p);
        }
      },
      [&](Pickler& p) {
        p.interned("after");
        p.mark();
        for (const std::size_t slot : slots) p.get(slot);
        p.tuple_from_mark();
      });
  Recorder recorder;
  EXPECT_THAT([&] { read(pickle, &recorder, {.max_objects = 1200}); },
              ThrowsError(ErrorKind::corruption, "objects in one pickle"));
  EXPECT_NO_THROW(read(pickle, &recorder, {.max_objects = 3000}));
}

TEST(PickleEntriesTest, DecodedTextsOfTakenEntriesCount) {
  // V: a text up to the end of the line, with escapes
  std::string pickle = "cm\nRoot\n)\x81}(Vitems\n}(";
  for (int i = 0; i < 200; ++i) pickle += "Vk\ncm\nItem\n)\x81}(Vn\nK\1ub";
  pickle += "uub.";
  Recorder recorder;
  EXPECT_THAT([&] { read(pickle, &recorder, {.max_objects = 350}); },
              ThrowsError(ErrorKind::corruption, "objects in one pickle"));
  EXPECT_NO_THROW(read(pickle, &recorder, {.max_objects = 450}));
}

TEST(PickleEntriesTest, AnEntryOfItsOwnOpcodeIsTakenToo) {
  Pickler p(4);
  begin_object(p, "Root");
  p.interned("items");
  p.empty_dict();
  p.text("a");
  item(p, 7);
  std::string pickle = std::move(p).finish();
  pickle.pop_back();  // STOP
  pickle += "sub.";   // SETITEM of the entry; SETITEMS and BUILD of the root
  Recorder recorder;
  const ObjectGraph graph = read(pickle, &recorder);
  EXPECT_THAT(recorder.entries, ElementsAre(testing::Pair("a", 7)));
  EXPECT_EQ(attribute(graph, "items").num_entries("items"), 0u);
}

TEST(PickleEntriesTest, AValueWithoutStateIsTakenWithTheNextOne) {
  const std::string pickle = root_with([](Pickler& p) {
    for (const char* name : {"a", "b", "c"}) {
      p.text(name);
      if (std::string_view(name) == "b") {
        item(p, 7);
        continue;
      }
      p.global("m", "Item");
      p.empty_tuple();
      p.new_object();
    }
  });
  Recorder recorder;
  read(pickle, &recorder);
  EXPECT_THAT(recorder.entries,
              ElementsAre(testing::Pair("a", -1), testing::Pair("b", 7), testing::Pair("c", -1)));
}

TEST(PickleEntriesTest, WhatTheMemoGivesLaterIsKept) {
  std::size_t shared = 0;
  const std::string pickle = root_with(
      [&](Pickler& p) {
        for (int i = 0; i < 100; ++i) {
          p.text("k" + std::to_string(i));
          begin_object(p, "Item");
          p.interned("n");
          p.integer(i);
          p.interned("shape");
          if (i == 50) {
            p.mark();
            p.global("m", "Item");
            p.integer(8);
            p.integer(4);
            p.tuple2();
            p.new_object();
            p.integer(16);
            p.tuple_from_mark();
            shared = p.memoize();
          } else if (i > 50) {
            p.get(shared);
          } else {
            p.none();
          }
          end_object(p);
        }
      },
      [&](Pickler& p) {
        p.interned("after");
        p.get(shared);
      });
  Recorder recorder;
  const ObjectGraph graph = read(pickle, &recorder);
  EXPECT_EQ(recorder.entries.size(), 100u);
  const Object after = attribute(graph, "after");
  ASSERT_EQ(after.num_items("after"), 2u);
  EXPECT_EQ(after.item(1).as_integer("after"), 16);
  EXPECT_EQ(after.item(0).global_name("call"), "Item");
  EXPECT_EQ(after.item(0).call_arguments("call").item(0).as_integer("call"), 8);
  EXPECT_EQ(after.item(0).call_arguments("call").item(1).as_integer("call"), 4);
  EXPECT_LT(graph.num_objects(), 60u);
}

TEST(PickleEntriesTest, ALaterChangeOfATakenEntryIsRefused) {
  std::size_t first = 0;
  const auto entry = [&](Pickler& p) {
    p.text("a");
    p.global("m", "Item");
    p.empty_tuple();
    p.new_object();
    first = p.memoize();
    p.empty_dict();
    p.build();
  };
  const auto change = [&](Pickler& p) {
    p.interned("b");
    p.get(first);
    p.empty_dict();
    p.build();
  };
  Recorder recorder;
  const std::string within = root_with([&](Pickler& p) {
    entry(p);
    change(p);
  });
  EXPECT_THAT([&] { read(within, &recorder); },
              ThrowsError(ErrorKind::corruption, "change of an object"));
  EXPECT_THAT([&] { read(root_with(entry, change), &recorder); },
              ThrowsError(ErrorKind::corruption, "change of an object"));
  EXPECT_EQ(read(within, nullptr).root().global_name("root"), "Root");
}

TEST(PickleEntriesTest, ATakenEntryCannotChangeAfterTheOutermostObject) {
  std::size_t taken = 0;
  std::size_t root = 0;
  const auto pickle_with = [&](const std::size_t& changed) {
    Pickler p(4);
    p.global("m", "Root");
    p.empty_tuple();
    p.new_object();
    root = p.memoize();
    p.empty_dict();
    p.mark();
    p.interned("items");
    p.empty_dict();
    p.mark();
    p.text("a");
    p.global("m", "Item");
    p.empty_tuple();
    p.new_object();
    taken = p.memoize();
    p.empty_dict();
    p.build();
    p.set_items_from_mark();
    end_object(p);
    p.get(changed);
    p.empty_dict();
    p.build();
    std::string pickle = std::move(p).finish();
    pickle.insert(pickle.size() - 1, "0");  // POP, before STOP
    return pickle;
  };
  Recorder recorder;
  EXPECT_THAT([&] { read(pickle_with(taken), &recorder); },
              ThrowsError(ErrorKind::corruption, "change of an object"));
  EXPECT_EQ(read(pickle_with(root), &recorder).root().global_name("root"), "Root");
}

TEST(PickleEntriesTest, AnEntryCannotBePutIntoAnOlderObject) {
  std::size_t list = 0;
  Pickler p(4);
  begin_object(p, "Root");
  p.interned("list");
  p.empty_list();
  list = p.memoize();
  p.interned("items");
  p.empty_dict();
  p.mark();
  p.text("a");
  p.get(list);
  p.integer(1);
  p.append();
  p.set_items_from_mark();
  end_object(p);
  const std::string pickle = std::move(p).finish();
  Recorder recorder;
  EXPECT_THAT([&] { read(pickle, &recorder); },
              ThrowsError(ErrorKind::corruption, "change of an object"));
}

TEST(PickleEntriesTest, AForeignGlobalEndsTheTaking) {
  const std::string pickle = root_with([](Pickler& p) {
    p.text("a");
    item(p, 1);
    p.text("b");
    p.global("os", "system");
    p.text("c");
    item(p, 3);
  });
  Recorder recorder;
  const ObjectGraph graph = read(pickle, &recorder);
  EXPECT_THAT(recorder.entries, ElementsAre(testing::Pair("a", 1)));
  const Object items = attribute(graph, "items");
  ASSERT_EQ(items.num_entries("items"), 2u);
  EXPECT_EQ(items.entry_value(0).global_name("b"), "system");
  EXPECT_EQ(items.entry_key(1).as_str("key"), "c");
}

/// A file in memory that counts the bytes that are read.
class ForwardFile final : public ReadableFile {
 public:
  explicit ForwardFile(std::string bytes) : bytes_(std::move(bytes)) {}
  const std::string& path() const override { return path_; }
  std::uint64_t nbytes() const override { return bytes_.size(); }
  void read_at(std::uint64_t offset, std::span<std::byte> out) const override {
    num_nbytes_read += out.size();
    std::memcpy(out.data(), bytes_.data() + offset, out.size());
  }

  mutable std::uint64_t num_nbytes_read = 0;

 private:
  const std::string path_ = "x.pkl";
  const std::string bytes_;
};

TEST(PickleEntriesTest, TheBytesOfAFileAreReleasedAndKeptTextsStay) {
  constexpr int kNumEntries = 2000;
  const auto name_of = [](int i) { return std::to_string(i) + std::string(10'000, 'k'); };
  for (const bool has_shared_tuples : {false, true}) {
    SCOPED_TRACE(has_shared_tuples ? "shared tuples" : "shared texts");
    std::vector<std::size_t> slots;
    const std::string pickle = root_with(
        [&](Pickler& p) {
          for (int i = 0; i < kNumEntries; ++i) {
            p.text(name_of(i));
            if (i % 100 == 0) slots.push_back(p.memoize());
            begin_object(p, "Item");
            p.interned("n");
            p.integer(i);
            p.interned("shape");
            p.text("a text that only this object has");
            p.tuple1();
            if (has_shared_tuples && i % 100 == 0) slots.push_back(p.memoize());
            end_object(p);
          }
        },
        [&](Pickler& p) {
          p.interned("after");
          p.mark();
          for (const std::size_t slot : slots) p.get(slot);
          p.tuple_from_mark();
        });
    ASSERT_GT(pickle.size(), std::size_t{16} << 20);  // more than one part of the file
    const ForwardFile file(pickle);
    static const AllowList allowed{kGlobals};
    Recorder recorder;
    const ObjectGraph graph = unpickle(PickleBytes(file), {.path = "x.pkl"}, allowed,
                                       {.policy = ForeignGlobals::Policy::record}, {}, &recorder);
    ASSERT_EQ(recorder.entries.size(), static_cast<std::size_t>(kNumEntries));
    for (int i = 0; i < kNumEntries; ++i) {
      ASSERT_EQ(recorder.entries[static_cast<std::size_t>(i)],
                (std::pair<std::string, std::int64_t>(name_of(i), i)));
    }
    const Object after = attribute(graph, "after");
    std::size_t next = 0;
    for (int i = 0; i < kNumEntries; i += 100) {
      EXPECT_EQ(after.item(next++).as_str("name"), name_of(i));
      if (!has_shared_tuples) continue;
      EXPECT_EQ(after.item(next++).item(0).as_str("text"), "a text that only this object has");
    }
    EXPECT_EQ(next, after.num_items("after"));
    EXPECT_LE(file.num_nbytes_read,
              (has_shared_tuples ? 2 : 1) * pickle.size() + pickle.size() / 2);
  }
}

TEST(PickleEntriesTest, AFileThatIsCutShortIsRefused) {
  std::string pickle = root_with([](Pickler& p) {
    p.text("a");
    item(p, 7);
  });
  static const AllowList allowed{kGlobals};
  for (std::size_t nbytes = 0; nbytes < pickle.size(); ++nbytes) {
    const ForwardFile file(pickle.substr(0, nbytes));
    Recorder recorder;
    EXPECT_THAT([&] { unpickle(PickleBytes(file), {.path = "x.pkl"}, allowed, {}, {}, &recorder); },
                ThrowsError(ErrorKind::corruption, "cut short?"))
        << nbytes;
  }
}

TEST(PickleEntriesTest, FetchedSlotsAreFoundInEveryForm) {
  using namespace std::string_literals;
  const auto slots = [](std::string_view pickle) {
    std::vector<std::size_t> fetched;
    PickleBytes bytes(pickle.begin(), pickle.end());
    const std::vector<bool> found = fetched_slots(bytes, 0);
    for (std::size_t i = 0; i < found.size(); ++i) {
      if (found[i]) fetched.push_back(i);
    }
    return fetched;
  };
  EXPECT_THAT(slots("NNNNNNh\x05g3\nj\x01\0\0\0\x8c\x02h\x07."s), ElementsAre(1, 3, 5));
  EXPECT_THAT(slots("h\xff."s), ElementsAre());                // no pickle of 3 bytes has slot 255
  EXPECT_THAT(slots("Nh\x01\x8c\xffh\x02"s), ElementsAre(1));  // the text is cut short
}

}  // namespace
}  // namespace tessera::formats::pickle
