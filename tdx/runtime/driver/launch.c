// Launches of tdx's own kernels by one call from Python.
//
// Triton's launcher and cuda.bindings look at every argument again, which costs several times what
// the driver takes. Here the parameters of a kernel lie in memory as the driver wants them, and a
// call fills in the addresses of its operands. See cuda_kernel.py, where the types are completed.
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include "cuda.h"

enum { BYTES = 4096, PARAMETERS = 256, OPERANDS = 16, VECTOR = 16, MAP = 64 };

typedef CUresult (*LaunchKernel)(const CUlaunchConfig *, CUfunction, void **, void **);

static PyObject *address_name, *find_name, *failed_name, *mark_name;

// A kernel and its parameters, for operands of one alignment.
typedef struct {
    PyObject_VAR_HEAD  // as many as there are bytes
    unsigned long long function;
    unsigned grid, threads, shared;
    unsigned odd;  // bit i: operand i is at no multiple of VECTOR
    Py_ssize_t count, operands;
    PyObject *maps;  // for each operand None, or what gives the tensor map of an address
    uint16_t places[OPERANDS];  // of the operands among the parameters
    uint16_t offsets[PARAMETERS];  // of the parameters in `bytes`
    char bytes[];
} Laid;

// Where a parameter of `size` bytes goes behind `end` others.
static Py_ssize_t place(Py_ssize_t end, Py_ssize_t size) {
    Py_ssize_t step = size > 8 ? MAP : 8;
    return (end + step - 1) / step * step;
}

static PyObject *laid_new(PyTypeObject *type, PyObject *args, PyObject *named) {
    unsigned long long function;
    unsigned grid, threads, shared, odd;
    PyObject *parameters, *places, *maps;
    if (!PyArg_ParseTuple(args, "KIIIO!IO!O!", &function, &grid, &threads, &shared, &PyTuple_Type,
                          &parameters, &odd, &PyTuple_Type, &places, &PyTuple_Type, &maps))
        return NULL;
    Py_ssize_t count = PyTuple_GET_SIZE(parameters), operands = PyTuple_GET_SIZE(places), size = 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *parameter = PyTuple_GET_ITEM(parameters, i);
        if (!PyBytes_Check(parameter)) {
            PyErr_SetString(PyExc_TypeError, "parameters are bytes");
            return NULL;
        }
        size = place(size, PyBytes_GET_SIZE(parameter)) + PyBytes_GET_SIZE(parameter);
    }
    if (count > PARAMETERS || size > BYTES || operands > OPERANDS ||
        operands != PyTuple_GET_SIZE(maps)) {
        PyErr_Format(PyExc_ValueError, "%zd parameters of %zd bytes, %zd operands: at most %d, %d "
                     "and %d", count, size, operands, PARAMETERS, BYTES, OPERANDS);
        return NULL;
    }
    Laid *self = (Laid *)type->tp_alloc(type, size);
    if (!self) return NULL;
    self->function = function;
    self->grid = grid, self->threads = threads, self->shared = shared, self->odd = odd;
    self->count = count, self->operands = operands;
    self->maps = Py_NewRef(maps);
    Py_ssize_t end = 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *parameter = PyTuple_GET_ITEM(parameters, i);
        Py_ssize_t at = place(end, PyBytes_GET_SIZE(parameter));
        memcpy(self->bytes + at, PyBytes_AS_STRING(parameter), PyBytes_GET_SIZE(parameter));
        self->offsets[i] = (uint16_t)at;
        end = at + PyBytes_GET_SIZE(parameter);
    }
    for (Py_ssize_t i = 0; i < operands; i++) {
        Py_ssize_t index = PyLong_AsSsize_t(PyTuple_GET_ITEM(places, i));
        if (index < 0 || index >= count) {
            if (!PyErr_Occurred()) PyErr_SetString(PyExc_IndexError, "there is no such parameter");
            Py_DECREF(self);
            return NULL;
        }
        self->places[i] = (uint16_t)index;
    }
    return (PyObject *)self;
}

static int laid_traverse(PyObject *self, visitproc visit, void *arg) {
    Py_VISIT(((Laid *)self)->maps);
    return 0;
}

static int laid_clear(PyObject *self) {
    Py_CLEAR(((Laid *)self)->maps);
    return 0;
}

static void laid_dealloc(PyObject *self) {
    PyObject_GC_UnTrack(self);
    laid_clear(self);
    Py_TYPE(self)->tp_free(self);
}

static PyTypeObject laid_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "tdx_launch.Laid",
    .tp_doc = "Laid(function, grid, threads, shared, parameters, odd, places, maps)",
    .tp_basicsize = offsetof(Laid, bytes),
    .tp_itemsize = 1,
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_new = laid_new,
    .tp_traverse = laid_traverse,
    .tp_clear = laid_clear,
    .tp_dealloc = laid_dealloc,
};

typedef struct {
    PyObject_HEAD
    vectorcallfunc call;
    LaunchKernel launch;
    PyObject *lasting;  // streams that need no mark
    Laid *laid;  // of the last launch
} Launcher;

// The parameters for operands of this alignment, a new reference.
static Laid *laid_for(Launcher *self, unsigned odd, Py_ssize_t operands) {
    if (self->laid && self->laid->odd == odd && self->laid->operands == operands)
        return (Laid *)Py_NewRef(self->laid);
    PyObject *pattern = PyLong_FromUnsignedLong(odd);
    if (!pattern) return NULL;
    PyObject *found = PyObject_CallMethodOneArg((PyObject *)self, find_name, pattern);
    Py_DECREF(pattern);
    if (!found) return NULL;
    if (!Py_IS_TYPE(found, &laid_type) || ((Laid *)found)->operands != operands) {
        PyErr_Format(PyExc_TypeError, "the kernel does not take %zd operands", operands);
        Py_DECREF(found);
        return NULL;
    }
    PyObject *before = (PyObject *)self->laid;
    self->laid = (Laid *)Py_NewRef(found);
    Py_XDECREF(before);
    return (Laid *)found;
}

// Put the map of the operand's memory where the kernel takes it.
static int fill_map(PyObject *maps, PyObject *operand, char *to) {
    PyObject *address = PyObject_GetAttr(operand, address_name);
    PyObject *map = address ? PyObject_GetItem(maps, address) : NULL;
    Py_XDECREF(address);
    if (!map) return -1;
    int fits = PyBytes_Check(map) && PyBytes_GET_SIZE(map) == sizeof(CUtensorMap);
    if (fits)
        memcpy(to, PyBytes_AS_STRING(map), sizeof(CUtensorMap));
    else
        PyErr_SetString(PyExc_TypeError, "that is no tensor map");
    Py_DECREF(map);
    return fits ? 0 : -1;
}

// Launch once. The driver's code, or -1 with an exception.
static int launch(Launcher *self, PyObject *const *args, Py_ssize_t count) {
    Py_ssize_t operands = count - 1;
    if (!self->lasting || operands < 0 || operands > OPERANDS) {
        PyErr_Format(PyExc_TypeError, "takes a stream and up to %d operands", OPERANDS);
        return -1;
    }
    unsigned long long stream = PyLong_AsUnsignedLongLong(args[0]);
    if (PyErr_Occurred()) return -1;
    uint64_t addresses[OPERANDS];
    unsigned odd = 0;
    for (Py_ssize_t i = 0; i < operands; i++) {
        PyObject *address = PyObject_GetAttr(args[i + 1], address_name);
        if (!address) return -1;
        addresses[i] = PyLong_AsUnsignedLongLong(address);
        Py_DECREF(address);
        if (PyErr_Occurred()) return -1;
        if (addresses[i] % VECTOR) odd |= 1u << i;
    }
    Laid *laid = laid_for(self, odd, operands);
    if (!laid) return -1;
    // a copy, so that other threads may launch while the driver makes this one wait
    _Alignas(MAP) char bytes[BYTES];
    void *table[PARAMETERS];
    memcpy(bytes, laid->bytes, Py_SIZE(laid));
    for (Py_ssize_t i = 0; i < laid->count; i++) table[i] = bytes + laid->offsets[i];
    for (Py_ssize_t i = 0; i < operands; i++) {
        PyObject *maps = PyTuple_GET_ITEM(laid->maps, i);
        char *to = table[laid->places[i]];
        if (maps == Py_None) {
            memcpy(to, &addresses[i], sizeof *addresses);
        } else if (fill_map(maps, args[i + 1], to) < 0) {
            Py_DECREF(laid);
            return -1;
        }
    }
    CUlaunchConfig config = {
        .gridDimX = laid->grid, .gridDimY = 1, .gridDimZ = 1,
        .blockDimX = laid->threads, .blockDimY = 1, .blockDimZ = 1,
        .sharedMemBytes = laid->shared, .hStream = (CUstream)(uintptr_t)stream,
    };
    CUfunction function = (CUfunction)(uintptr_t)laid->function;
    Py_DECREF(laid);
    CUresult code;
    Py_BEGIN_ALLOW_THREADS
    code = self->launch(&config, function, table, NULL);
    Py_END_ALLOW_THREADS
    return (int)code;
}

static PyObject *launcher_call(PyObject *callable, PyObject *const *args, size_t flags,
                               PyObject *names) {
    Launcher *self = (Launcher *)callable;
    Py_ssize_t count = PyVectorcall_NARGS(flags);
    if (names && PyTuple_GET_SIZE(names)) {
        PyErr_SetString(PyExc_TypeError, "takes no keywords");
        return NULL;
    }
    int code = launch(self, args, count);
    if (code < 0) return NULL;
    if (code) {
        PyObject *number = PyLong_FromLong(code), *given = PyTuple_New(count), *done = NULL;
        for (Py_ssize_t i = 0; given && i < count; i++)
            PyTuple_SET_ITEM(given, i, Py_NewRef(args[i]));
        if (number && given)
            done = PyObject_CallMethodObjArgs(callable, failed_name, number, given, NULL);
        Py_XDECREF(number);
        Py_XDECREF(given);
        if (!done) return NULL;
        Py_DECREF(done);
    }
    int lasts = PySet_Contains(self->lasting, args[0]);
    if (lasts < 0) return NULL;
    return lasts ? Py_NewRef(Py_None) : PyObject_CallMethodOneArg(callable, mark_name, args[0]);
}

static PyObject *launcher_launch(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    int code = launch((Launcher *)self, args, count);
    return code < 0 ? NULL : PyLong_FromLong(code);
}

static PyObject *launcher_new(PyTypeObject *type, PyObject *args, PyObject *named) {
    PyObject *self = type->tp_alloc(type, 0);
    if (self) ((Launcher *)self)->call = launcher_call;
    return self;
}

static int launcher_init(PyObject *object, PyObject *args, PyObject *named) {
    Launcher *self = (Launcher *)object;
    PyObject *lasting;
    unsigned long long address;
    if (!PyArg_ParseTuple(args, "KO!", &address, &PySet_Type, &lasting)) return -1;
    self->launch = (LaunchKernel)(uintptr_t)address;
    Py_XSETREF(self->lasting, Py_NewRef(lasting));
    return 0;
}

static int launcher_traverse(PyObject *object, visitproc visit, void *arg) {
    Py_VISIT(((Launcher *)object)->lasting);
    Py_VISIT(((Launcher *)object)->laid);
    return 0;
}

static int launcher_clear(PyObject *object) {
    Py_CLEAR(((Launcher *)object)->lasting);
    Py_CLEAR(((Launcher *)object)->laid);
    return 0;
}

static void launcher_dealloc(PyObject *object) {
    PyObject_GC_UnTrack(object);
    launcher_clear(object);
    Py_TYPE(object)->tp_free(object);
}

static PyMethodDef launcher_methods[] = {
    {"launch", (PyCFunction)(void (*)(void))launcher_launch, METH_FASTCALL,
     "launch(stream, *operands): the driver's code; a failure is not looked at."},
    {NULL},
};

static PyTypeObject launcher_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "tdx_launch.Launcher",
    .tp_doc = "Launcher(address of cuLaunchKernelEx, lasting streams)\n\n"
              "To be completed by find(odd), which gives a Laid, failed(code, args) and mark(stream).\n"
              "Called with a stream and operands.",
    .tp_basicsize = sizeof(Launcher),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC |
                Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_vectorcall_offset = offsetof(Launcher, call),
    .tp_call = PyVectorcall_Call,
    .tp_methods = launcher_methods,
    .tp_new = launcher_new,
    .tp_init = launcher_init,
    .tp_traverse = launcher_traverse,
    .tp_clear = launcher_clear,
    .tp_dealloc = launcher_dealloc,
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "tdx_launch", "Launches of laid-out kernels.", -1, NULL,
};

PyMODINIT_FUNC PyInit_tdx_launch(void) {
    address_name = PyUnicode_InternFromString("address");
    find_name = PyUnicode_InternFromString("find");
    failed_name = PyUnicode_InternFromString("failed");
    mark_name = PyUnicode_InternFromString("mark");
    if (!address_name || !find_name || !failed_name || !mark_name) return NULL;
    PyObject *made = PyModule_Create(&module);
    if (!made || PyModule_AddType(made, &laid_type) < 0 ||
        PyModule_AddType(made, &launcher_type) < 0) {
        Py_XDECREF(made);
        return NULL;
    }
    return made;
}
