#include "agent/output_recipe.h"

#include <structmember.h>

#include <cstring>
#include <utility>

#include "absl/container/inlined_vector.h"
#include "absl/strings/str_cat.h"
#include "agent/call_table.h"
#include "agent/cpython_compat.h"
#include "agent/input_signature.h"
#include "agent/op_recorder.h"

namespace cuvil::agent {
namespace {

constexpr size_t kMaxNodes = 100000;

// The dict that holds an instance's attributes, without making one.
PyObject* AttributesOf(PyObject* object) {
  PyTypeObject* type = Py_TYPE(object);
  if (!(type->tp_flags & Py_TPFLAGS_HEAPTYPE)) return nullptr;
  if (DictPointerOffset(type, object) == 0) return nullptr;
  return reinterpret_cast<PyObject*>(InstanceDict(object));
}

// Every __slots__ descriptor of the type's MRO. False if there is C data that cannot be copied.
bool SlotsOf(PyTypeObject* type, std::vector<Py_ssize_t>* offsets) {
  PyObject* mro = type->tp_mro;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(mro); ++i) {
    auto* base = reinterpret_cast<PyTypeObject*>(PyTuple_GET_ITEM(mro, i));
    if (!(base->tp_flags & Py_TPFLAGS_HEAPTYPE) || base->tp_members == nullptr) continue;
    PyObject* key;
    PyObject* value;
    Py_ssize_t position = 0;
    while (PyDict_Next(TypeNamespace(base), &position, &key, &value)) {
      if (Py_TYPE(value) != &PyMemberDescr_Type) continue;
      PyMemberDef* member = reinterpret_cast<PyMemberDescrObject*>(value)->d_member;
      if (member->type != T_OBJECT && member->type != T_OBJECT_EX) return false;
      offsets->push_back(member->offset);
    }
  }
  return true;
}

PyTypeObject* BuiltinBase(PyTypeObject* type) {
  while (type != nullptr && (type->tp_flags & Py_TPFLAGS_HEAPTYPE) && type != Types().defaultdict) type = type->tp_base;
  return type;
}

}  // namespace

struct OutputRecipe::Describer {
  OutputRecipe* recipe;
  const HeapLog& heap;
  const std::unordered_set<PyObject*>& guarded;
  const InputSignature& inputs;
  OpRecorder* recorder;
  WhyNot* why_not;
  std::unordered_map<PyObject*, uint32_t> done;
  std::unordered_map<uint32_t, uint32_t> output_of_value;
  std::unordered_set<PyObject*> attribute_dicts;

  // An immutable object that the recipe owns and hands out.
  static bool IsValue(PyObject* object) {
    PyTypeObject* type = Py_TYPE(object);
    return IsAtom(object) || type == Types().dtype || type == Types().device || type == Types().layout ||
           type == Types().memory_format || type == Types().size || type == &PyRange_Type ||
           (PyType_Check(object) && !(reinterpret_cast<PyTypeObject*>(object)->tp_flags & Py_TPFLAGS_HEAPTYPE));
  }

  // An object that existed before the call and that the guards prove to be there again.
  bool SetExisting(uint32_t index, PyObject* object) {
    Node& node = recipe->nodes_[index];
    node.kind = Kind::kExisting;
    node.existing = ExpectedValue(object);
    node.existing_pointer = object;
    if (node.existing.unknown()) return false;
    return !node.existing.needs_place() || guarded.count(object) != 0;
  }

  // Index of the node, or -1.
  int64_t Add(PyObject* object, int depth) {
    if (recipe->nodes_.size() > kMaxNodes || depth > 64) {
      why_not->message = "the result is too large to be rebuilt";
      why_not->advice = "return fewer objects, and lists that are nested less deeply";
      return -1;
    }
    auto index = static_cast<uint32_t>(recipe->nodes_.size());
    const bool is_value = IsValue(object);
    if (auto found = done.find(object); found != done.end() && !is_value) {
      recipe->nodes_.push_back({Kind::kRepeat, found->second});
      return index;
    }
    recipe->nodes_.push_back({Kind::kAtom});
    done.emplace(object, index);
    PyTypeObject* type = Py_TYPE(object);
    if (IsTensor(object)) return AddTensor(object, index);
    if (is_value) {
      recipe->nodes_[index].object = OwnedRef::New(object);
      return index;
    }
    int64_t position = inputs.PositionOf(object);
    if (position >= 0) {
      recipe->nodes_[index].kind = Kind::kArgument;
      recipe->nodes_[index].index = static_cast<uint32_t>(position);
      return index;
    }
    if (!heap.IsNew(object) && !PyTuple_Check(object)) {
      // It existed before: the guards prove that the same place still holds it.
      if (!heap.HasSeen(object)) {
        why_not->message = absl::StrCat("the result holds a ", type->tp_name, " that no watched read produced");
        why_not->advice = "make it inside of the call, or keep it in an attribute that forward reads";
        return -1;
      }
      if (SetExisting(index, object)) return index;
      why_not->message = absl::StrCat("the result holds a ", type->tp_name, " that is held where no guard looks");
      why_not->advice = "keep it in an attribute of the model, or make it inside of the call";
      return -1;
    }
    return AddContainer(object, index, depth);
  }

  int64_t AddTensor(PyObject* tensor, uint32_t index) {
    Node& node = recipe->nodes_[index];
    int64_t position = inputs.PositionOf(tensor);
    if (position >= 0) {
      node.kind = Kind::kArgument;
      node.index = static_cast<uint32_t>(position);
      return index;
    }
    std::optional<cir::ValueId> value = recorder->Find(tensor);
    if (!value || recorder->graph().graph().value(*value).origin == cir::Origin::kCaptured) {
      if (!heap.HasSeen(tensor) || heap.IsNew(tensor)) {
        why_not->message = "the result holds a tensor that no operator made";
        why_not->advice = "make result tensors with torch functions";
        return -1;
      }
      if (SetExisting(index, tensor)) return index;
      why_not->message = "the result holds a tensor that is held where no guard looks";
      why_not->advice = "keep it in an attribute or a buffer of the model";
      return -1;
    }
    if (HasInstanceAttributes(tensor)) {
      why_not->message = "a result tensor carries Python attributes";
      why_not->advice = "set no attributes on tensors; return the value beside the tensor";
      return -1;
    }
    auto [found, inserted] =
        output_of_value.try_emplace(value->index, static_cast<uint32_t>(recorder->graph().graph().outputs.size()));
    if (inserted) recorder->graph().AddOutput(*value);
    node.kind = Kind::kResult;
    node.index = found->second;
    return index;
  }

  bool AddChild(uint32_t index, PyObject* child, int depth, std::vector<uint32_t> Node::*list) {
    int64_t added = Add(child, depth + 1);
    if (added < 0) return false;
    (recipe->nodes_[index].*list).push_back(static_cast<uint32_t>(added));
    return true;
  }

  // Keys are found by hash and identity: what cannot be owned is an argument or comes from a guarded place.
  bool AddKey(uint32_t index, PyObject* key, int depth) {
    if (PyTuple_CheckExact(key) && IsPlainKey(key) && ExpectedValue::MayOwn(key)) {
      recipe->nodes_[index].children.push_back(static_cast<uint32_t>(recipe->nodes_.size()));
      recipe->nodes_.push_back({Kind::kAtom});
      recipe->nodes_.back().object = OwnedRef::New(key);
      return true;
    }
    const bool is_new = heap.IsNew(key);
    if (!IsAtom(key) && is_new && !(PyTuple_CheckExact(key) && IsPlainKey(key))) {
      why_not->message = "the result has a dict whose keys were made by the call";
      why_not->advice = "use strings, numbers or enum members as keys";
      return false;
    }
    if (PyTuple_Check(key) && !is_new && inputs.PositionOf(key) < 0) {
      why_not->message = "the result has a dict with a tuple as key that would have to be the same again";
      why_not->advice = "use strings or numbers as keys, or make the tuple inside of the call";
      return false;
    }
    return AddChild(index, key, depth, &Node::children);
  }

  // Held weakly: a class may reach the model that makes its instances.
  bool SetType(uint32_t index, PyTypeObject* type) {
    Node& node = recipe->nodes_[index];
    node.existing_pointer = reinterpret_cast<PyObject*>(type);
    node.existing = ExpectedValue(node.existing_pointer);
    return !node.existing.unknown();
  }

  bool AddAttributes(uint32_t index, PyObject* object, int depth) {
    PyObject* attributes = AttributesOf(object);
    if (attributes == nullptr) return true;
    // The rebuilt object gets a plain dict of its own. Another one, or one that something else holds (`self.__dict__ =
    // self`), would show.
    const bool is_shared = Py_REFCNT(attributes) > 1 && !heap.IsNew(attributes);
    if (!PyDict_CheckExact(attributes) || is_shared || !attribute_dicts.insert(attributes).second) {
      why_not->message =
          absl::StrCat("the attributes of a ", Py_TYPE(object)->tp_name, " in the result are not its own");
      why_not->advice = "return objects that share their __dict__ with nothing";
      return false;
    }
    Py_ssize_t position = 0;
    PyObject* key;
    PyObject* value;
    while (PyDict_Next(attributes, &position, &key, &value)) {
      if (!PyUnicode_CheckExact(key)) {
        why_not->message = "the result has an attribute whose name is no str";
        why_not->advice = "name attributes by plain strings";
        return false;
      }
      recipe->nodes_[index].attribute_names.push_back(OwnedRef::New(key));
      if (!AddChild(index, value, depth, &Node::attributes)) return false;
    }
    return true;
  }

  int64_t AddContainer(PyObject* object, uint32_t index, int depth) {
    PyTypeObject* type = Py_TYPE(object);
    if (!SetType(index, type)) {
      why_not->message = absl::StrCat("the type ", type->tp_name, " cannot be told from another one");
      why_not->advice = "define the class at the top of its file";
      return -1;
    }
    PyTypeObject* base = BuiltinBase(type);
    if (PyTuple_Check(object)) {
      recipe->nodes_[index].kind = Kind::kTuple;
      for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(object); ++i) {
        if (!AddChild(index, PyTuple_GET_ITEM(object, i), depth, &Node::children)) return -1;
      }
      return AddAttributes(index, object, depth) ? int64_t{index} : -1;
    }
    if (type == &PyList_Type) {
      recipe->nodes_[index].kind = Kind::kList;
      for (Py_ssize_t i = 0; i < PyList_GET_SIZE(object); ++i) {
        if (!AddChild(index, PyList_GET_ITEM(object, i), depth, &Node::children)) return -1;
      }
      return index;
    }
    if (PyDict_Check(object) && (base == &PyDict_Type || base == &PyODict_Type || base == Types().defaultdict)) {
      recipe->nodes_[index].kind = Kind::kDict;
      if (base == Types().defaultdict) {
        const OwnedRef factory = OwnedRef::Steal(PyObject_GetAttrString(object, "default_factory"));
        if (!factory) PyErr_Clear();
        recipe->nodes_[index].has_factory = true;
        if (!factory || !AddChild(index, factory.get(), depth, &Node::children)) return -1;
      }
      std::vector<std::pair<PyObject*, PyObject*>> items;
      if (base == &PyODict_Type) {
        // Insertion order of an OrderedDict is kept outside of the dict.
        OwnedRef keys =
            OwnedRef::Steal(PyObject_CallMethod(reinterpret_cast<PyObject*>(&PyODict_Type), "keys", "O", object));
        OwnedRef list = keys ? OwnedRef::Steal(PySequence_List(keys.get())) : OwnedRef();
        if (!list) {
          PyErr_Clear();
          return -1;
        }
        for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list.get()); ++i) {
          PyObject* key = PyList_GET_ITEM(list.get(), i);
          PyObject* value = PyDict_GetItemWithError(object, key);
          if (value == nullptr) return -1;
          items.emplace_back(key, value);
        }
      } else {
        Py_ssize_t position = 0;
        PyObject* key;
        PyObject* value;
        while (PyDict_Next(object, &position, &key, &value)) items.emplace_back(key, value);
      }
      for (const auto& [key, value] : items) {
        if (!AddKey(index, key, depth)) return -1;
        if (!AddChild(index, value, depth, &Node::children)) return -1;
      }
      return AddAttributes(index, object, depth) ? int64_t{index} : -1;
    }
    if (type == &PySlice_Type) {
      recipe->nodes_[index].kind = Kind::kSlice;
      auto* slice = reinterpret_cast<PySliceObject*>(object);
      for (PyObject* part : {slice->start, slice->stop, slice->step}) {
        if (!AddChild(index, part, depth, &Node::children)) return -1;
      }
      return index;
    }
    // SolidBase: a C type made at run time (deque, partial) has state that no slot shows.
    if (SolidBase(type) == &PyBaseObject_Type && (type->tp_flags & Py_TPFLAGS_HEAPTYPE) && !PyType_Check(object) &&
        type->tp_finalize == nullptr && type->tp_itemsize == 0) {
      recipe->nodes_[index].kind = Kind::kInstance;
      std::vector<Py_ssize_t> offsets;
      if (!SlotsOf(type, &offsets)) {
        why_not->message = absl::StrCat("the result holds a ", type->tp_name, " with C data");
        return -1;
      }
      for (Py_ssize_t offset : offsets) {
        PyObject* value;
        std::memcpy(&value, reinterpret_cast<char*>(object) + offset, sizeof value);
        if (value == nullptr) continue;
        recipe->nodes_[index].member_offsets.push_back(offset);
        if (!AddChild(index, value, depth, &Node::members)) return -1;
      }
      return AddAttributes(index, object, depth) ? int64_t{index} : -1;
    }
    why_not->message = absl::StrCat("the result holds an object of type ", type->tp_name);
    return -1;
  }
};

std::unique_ptr<OutputRecipe> OutputRecipe::Describe(PyObject* result, const HeapLog& heap,
                                                     const std::unordered_set<PyObject*>& guarded,
                                                     const InputSignature& inputs, OpRecorder* recorder,
                                                     WhyNot* why_not) {
  auto recipe = std::make_unique<OutputRecipe>();
  Describer describer{recipe.get(), heap, guarded, inputs, recorder, why_not, {}, {}, {}};
  if (describer.Add(result, 0) < 0) return nullptr;
  for (PyObject* attributes : describer.attribute_dicts) {
    if (describer.done.count(attributes) == 0) continue;
    why_not->message = "the result holds an object beside its own __dict__";
    why_not->advice = "return the object, or a copy of its __dict__";
    return nullptr;
  }
  for (const Node& node : recipe->nodes_) {
    if (node.kind != Kind::kAtom || node.object) continue;
    why_not->message = "the result holds something that could not be described";
    return nullptr;
  }
  return recipe;
}

struct OutputRecipe::Builder {
  const OutputRecipe& recipe;
  const CallArgs& call;
  const InputSignature& inputs;
  std::vector<torch_abi::OwnedTensor>& results;
  // Results are small as a rule, and a call without the heap is a tenth of a microsecond shorter.
  absl::InlinedVector<OwnedRef, 8> tensors;  // by plan output
  absl::InlinedVector<PyObject*, 32> built;  // by node; borrowed from their parents
  size_t next = 0;

  // New reference.
  PyObject* Next() {
    size_t index = next++;
    const Node& node = recipe.nodes_[index];
    PyObject* object = Make(node, index);
    return object;
  }

  PyObject* Remember(size_t index, PyObject* object) {
    built[index] = object;
    return object;
  }

  // Borrowed; null if the class is gone.
  static PyTypeObject* TypeOf(const Node& node) {
    if (!node.existing.Matches(node.existing_pointer)) return nullptr;
    return reinterpret_cast<PyTypeObject*>(node.existing_pointer);
  }

  PyObject* Make(const Node& node, size_t index) {
    switch (node.kind) {
      case Kind::kAtom:
        return node.object ? Remember(index, Py_NewRef(node.object.get())) : nullptr;
      case Kind::kRepeat:
        return built[node.index] == nullptr ? nullptr : Py_NewRef(built[node.index]);
      case Kind::kArgument: {
        PyObject* argument = inputs.ObjectAt(call, node.index);
        return argument == nullptr ? nullptr : Remember(index, Py_NewRef(argument));
      }
      case Kind::kExisting: {
        // Alive: the place that holds it was compared moments ago, under this or an earlier hold of the GIL; a weak
        // reference settles the rest.
        if (!node.existing.Matches(node.existing_pointer)) return nullptr;
        return Remember(index, Py_NewRef(node.existing_pointer));
      }
      case Kind::kResult: {
        OwnedRef& tensor = tensors[node.index];
        if (!tensor) {
          tensor = OwnedRef::Steal(Bridge().ToPyObject(std::move(results[node.index])));
          if (!tensor) return nullptr;
        }
        return Remember(index, Py_NewRef(tensor.get()));
      }
      case Kind::kTuple: {
        PyTypeObject* type = TypeOf(node);
        if (type == nullptr) return nullptr;
        auto size = static_cast<Py_ssize_t>(node.children.size());
        PyObject* tuple = type == &PyTuple_Type ? PyTuple_New(size) : type->tp_alloc(type, size);
        if (tuple == nullptr) return nullptr;
        for (Py_ssize_t i = 0; i < size; ++i) {
          PyObject* item = Next();
          if (item == nullptr) return Fail(tuple);
          PyTuple_SET_ITEM(tuple, i, item);
        }
        Remember(index, tuple);
        return FillAttributes(node, tuple) ? tuple : Fail(tuple);
      }
      case Kind::kList: {
        auto size = static_cast<Py_ssize_t>(node.children.size());
        PyObject* list = PyList_New(size);
        if (list == nullptr) return nullptr;
        Remember(index, list);
        for (Py_ssize_t i = 0; i < size; ++i) {
          PyObject* item = Next();
          if (item == nullptr) return Fail(list);
          PyList_SET_ITEM(list, i, item);
        }
        return list;
      }
      case Kind::kDict:
        return MakeDict(node, index);
      case Kind::kSlice: {
        OwnedRef parts[3];
        for (OwnedRef& part : parts) {
          part = OwnedRef::Steal(Next());
          if (!part) return nullptr;
        }
        return Remember(index, PySlice_New(parts[0].get(), parts[1].get(), parts[2].get()));
      }
      case Kind::kInstance: {
        PyTypeObject* type = TypeOf(node);
        if (type == nullptr) return nullptr;
        PyObject* object = type->tp_alloc(type, 0);
        if (object == nullptr) return nullptr;
        Remember(index, object);
        for (Py_ssize_t offset : node.member_offsets) {
          PyObject* value = Next();
          if (value == nullptr) return Fail(object);
          std::memcpy(reinterpret_cast<char*>(object) + offset, &value, sizeof value);
        }
        return FillAttributes(node, object) ? object : Fail(object);
      }
    }
    return nullptr;
  }

  PyObject* MakeDict(const Node& node, size_t index) {
    PyTypeObject* type = TypeOf(node);
    if (type == nullptr) return nullptr;
    PyTypeObject* base = BuiltinBase(type);
    OwnedRef factory;
    if (node.has_factory) {
      factory = OwnedRef::Steal(Next());
      if (!factory) return nullptr;
    }
    PyObject* dict = type == &PyDict_Type ? PyDict_New() : nullptr;
    if (dict == nullptr) {
      // The builtin base's constructor, not the subclass's __init__.
      OwnedRef none = OwnedRef::Steal(PyTuple_New(0));
      dict = base->tp_new(type, none.get(), nullptr);
      if (dict == nullptr) return nullptr;
      // Without arguments the constructors of dict and OrderedDict leave an empty one as it is.
      if (factory) {
        OwnedRef arguments = OwnedRef::Steal(PyTuple_Pack(1, factory.get()));
        if (!arguments || base->tp_init(dict, arguments.get(), nullptr) < 0) return Fail(dict);
      }
    }
    Remember(index, dict);
    for (size_t i = node.has_factory ? 1 : 0; i < node.children.size(); i += 2) {
      const OwnedRef key = OwnedRef::Steal(Next());
      PyObject* value = key ? Next() : nullptr;
      if (value == nullptr) return Fail(dict);
      int failed =
          base == &PyODict_Type ? PyODict_SetItem(dict, key.get(), value) : PyDict_SetItem(dict, key.get(), value);
      Py_DECREF(value);
      if (failed != 0) return Fail(dict);
    }
    return FillAttributes(node, dict) ? dict : Fail(dict);
  }

  bool FillAttributes(const Node& node, PyObject* object) {
    for (const OwnedRef& name : node.attribute_names) {
      PyObject* value = Next();
      if (value == nullptr) return false;
      PyObject* attributes = PyObject_GenericGetDict(object, nullptr);
      int failed = attributes == nullptr ? -1 : PyDict_SetItem(attributes, name.get(), value);
      Py_XDECREF(attributes);
      Py_DECREF(value);
      if (failed != 0) return false;
    }
    return true;
  }

  PyObject* Fail(PyObject* partial) {
    PyErr_Clear();
    Py_DECREF(partial);
    return nullptr;
  }
};

PyObject* OutputRecipe::Build(const CallArgs& call, const InputSignature& inputs,
                              std::vector<torch_abi::OwnedTensor> results) const {
  Builder builder{*this, call, inputs, results, {}, {}, 0};
  builder.tensors.resize(results.size());
  builder.built.resize(nodes_.size());
  PyObject* object = builder.Next();
  if (object == nullptr) PyErr_Clear();
  return object;
}

}  // namespace cuvil::agent
