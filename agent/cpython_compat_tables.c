// CPython's opcode tables. They are defined in headers with designated array initialisers, which only C accepts.

#include <Python.h>

#if PY_VERSION_HEX >= 0x030D0000
#define NEED_OPCODE_METADATA 1
#include <internal/pycore_opcode_metadata.h>
int CuvilOpcodeHasJump(int opcode) { return OPCODE_HAS_JUMP(opcode) != 0; }
#else
#define NEED_OPCODE_TABLES 1
#include <internal/pycore_opcode.h>
int CuvilOpcodeHasJump(int opcode) { return (int)((_PyOpcode_Jump[opcode >> 5] >> (opcode & 31)) & 1); }
#endif

int CuvilOpcodeCaches(int opcode) { return _PyOpcode_Caches[opcode]; }
