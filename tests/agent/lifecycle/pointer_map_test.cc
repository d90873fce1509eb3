#include "agent/lifecycle/pointer_map.h"

#include <gtest/gtest.h>

#include <random>
#include <unordered_map>

namespace cuvil::agent {
namespace {

TEST(PointerMapTest, AgreesWithAStandardMapOverRandomOperations) {
  PointerMap<int> map;
  std::unordered_map<const void*, int> expected;
  std::mt19937 random(7);
  for (int i = 0; i < 200'000; ++i) {
    // Few, 16-aligned addresses: collisions and wrap-around are the rule.
    const void* key = reinterpret_cast<const void*>(uintptr_t{16} * (1 + random() % 300));
    const auto it = expected.find(key);
    switch (random() % 3) {
      case 0:
        if (it == expected.end()) {
          expected[key] = i;
          map.Insert(key, std::make_unique<int>(i));
        }
        break;
      case 1: {
        const std::unique_ptr<int> taken = map.Take(key);
        ASSERT_EQ(taken != nullptr, it != expected.end());
        if (taken != nullptr) {
          ASSERT_EQ(*taken, it->second);
          expected.erase(it);
        }
        break;
      }
      default: {
        const int* found = map.Find(key);
        ASSERT_EQ(found != nullptr, it != expected.end());
        if (found != nullptr) {
          ASSERT_EQ(*found, it->second);
        }
      }
    }
    ASSERT_EQ(map.size(), expected.size());
  }
  EXPECT_EQ(map.Values().size(), expected.size());
}

TEST(PointerMapTest, AValueIsOutOfTheMapWhenItDies) {
  struct Value {
    PointerMap<Value>* map;
    const void* key;
    bool* seen;
    ~Value() { *seen = map->Find(key) != nullptr; }
  };
  PointerMap<Value> map;
  int object = 0;
  bool seen = true;
  auto value = std::make_unique<Value>();
  *value = {&map, &object, &seen};
  Value* inserted = map.Insert(&object, std::move(value));
  EXPECT_EQ(map.Find(&object), inserted);
  map.Take(&object).reset();
  EXPECT_FALSE(seen);
}

}  // namespace
}  // namespace cuvil::agent
