"""Every variant of every kernel compiles for every generation of GPUs, without spilling registers.

``kernels/compiled.json`` holds what the compiler said of the sources as they are.
"""

import pytest

from kfac_engine.kernels.launch import MACROS, source, variants
from scripts import compile_kernels
from tests.cuda_on_cpu import nvrtc

# A block of 256 threads cannot start with more registers a thread; a block of shared memory that is
# declared statically cannot be larger.
MOST_REGISTERS = 255
MOST_SHARED_BYTES = 48 << 10

# Of these there are no kernels for tensor cores.
WITHOUT_TENSOR_CORES = ("sm_70", "sm_75")

each_source = pytest.mark.parametrize("name", MACROS)


def has_kernels(name, architecture):
    tensor_cores = name in ("pair_products", "pair_rows")
    return not (tensor_cores and architecture in WITHOUT_TENSOR_CORES)


@each_source
def test_compiled_table_matches_sources(name):
    known = compile_kernels.fingerprints().get(name)
    assert known == compile_kernels.fingerprint(name), (
        f"{name}.cu or what it is compiled with has changed: run "
        "`python -m scripts.compile_kernels`, then `python -m scripts.kernel_report`"
    )


@each_source
def test_no_kernel_variant_spills_registers(name):
    table = compile_kernels.compiled(name)
    for architecture in nvrtc.ARCHITECTURES:
        for options in variants(name):
            listed_resources = table[compile_kernels.entry(options, architecture)]
            assert bool(listed_resources) == has_kernels(name, architecture), (
                options,
                architecture,
            )
            for kernel, use in listed_resources.items():
                where = kernel, options, architecture
                assert use.spilled_bytes == 0, where
                assert use.registers <= MOST_REGISTERS, where
                assert use.shared_bytes <= MOST_SHARED_BYTES, where


@each_source
def test_compiler_reproduces_table_entry(name):
    """Of one variant, chosen by the source itself: another change, another variant."""
    asked = [(o, a) for a in nvrtc.ARCHITECTURES for o in variants(name) if has_kernels(name, a)]
    options, architecture = asked[int(compile_kernels.fingerprint(name), 16) % len(asked)]
    if not nvrtc.installed(architecture):
        pytest.skip("no NVRTC for this architecture; install the extra 'nvrtc'")
    expected_resources = compile_kernels.compiled(name)[
        compile_kernels.entry(options, architecture)
    ]
    assert nvrtc.resources(name, options, architecture) == expected_resources


each_architecture = pytest.mark.parametrize("architecture", compile_kernels.LOOP_ARCHITECTURES)

# Cycles in which a scheduler of an H200 has one product of 16 x 8 x 16 numbers computed, with
# mma.sync at 62 % of the rate of tensor cores.
PRODUCT_CYCLES = 6.4


@pytest.mark.parametrize(
    "variant", [name for name in compile_kernels.loops("pair_products") if "PRODUCTS=3" in name]
)
def test_products_of_pairs_are_bound_by_tensor_cores(variant):
    """A kernel that split numbers in its loop had 938 cycles of integers for 307 of products."""
    *inner, outer = compile_kernels.loops("pair_products")[variant]["pair_products"]
    # With two columns of tiles, a stage has twice 16 positions: two passes of an inner loop.
    passes = [outer, *(2 * inner)]
    instructions, integer, tensor, *_ = (sum(numbers) for numbers in zip(*passes, strict=True))
    assert instructions < PRODUCT_CYCLES * tensor
    assert 2 * integer < 0.5 * PRODUCT_CYCLES * tensor
    copies = sum(loop.wide_copies for loop in passes)
    assert tensor == 48 * (2 if inner else 1)
    assert tensor >= 8 * copies > 0
    assert not any(loop.narrow_copies or loop.wide_loads or loop.narrow_loads for loop in passes)
    assert not any(loop.local for loop in passes)


@pytest.mark.parametrize(
    "variant",
    [
        name
        for name in compile_kernels.loops("pair_rows")
        if "-DSIDE=2 -DPRODUCTS=3 -DINPUT=0" in name
    ],
)
def test_products_of_rows_are_bound_by_tensor_cores(variant):
    """Each number is converted once for 128 products; 12 reads are those of two kinds of blocks."""
    *_, loop = compile_kernels.loops("pair_rows")[variant]["pair_rows"]
    assert loop.tensor == 2 * 48  # two passes of 16 positions
    assert loop.instructions < PRODUCT_CYCLES * loop.tensor
    assert 2 * loop.integer < 0.6 * PRODUCT_CYCLES * loop.tensor
    assert loop.wide_loads + loop.narrow_loads <= 12
    assert loop.wide_copies == loop.narrow_copies == loop.local == 0


# Kernels that read whole arrays.
READERS = [
    ("averages", "update_average", "-DINPUT=0"),
    ("spans", "find_infinite", "-DINPUT=0"),
    ("spans", "find_infinite", "-DINPUT=3"),
    ("spans", "multiply_pairs", "-DINPUT=0"),
    ("spans", "multiply_pairs", "-DINPUT=3"),
    ("example_sums", "example_sums", "-DACROSS=0 -DINPUT=0"),
]


@each_architecture
@pytest.mark.parametrize(("source_name", "name", "option"), READERS)
def test_readers_of_arrays_read_16_bytes_at_a_time(source_name, name, option, architecture):
    """A loop with reads of 4 bytes had 22 instructions for 16 bytes."""
    loops = compile_kernels.loops(source_name)[f"{architecture} {option}"][name]
    hot = max(loops, key=lambda loop: loop.wide_loads)
    assert hot.wide_loads >= 4  # several reads at a time hide the latency of memory
    assert hot.narrow_loads == hot.local == 0
    assert hot.instructions <= 16 * hot.wide_loads


# Loops that read numbers one by one: their source, options and kernel, the reads of a pass, and the
# largest number of its instructions. With divisions for each position they had 550, 496 and 145.
WITHOUT_DIVISIONS = [
    ("few_products", "-DROWS=10 -DINPUT=0", "few_products", 10, 340),
    ("few_products", "-DROWS=10 -DINPUT=0", "few_squares", 11, 280),
    ("patch_sums", "-DSQUARED=0 -DINPUT=0", "add_sums", 1, 50),
    ("patch_sums", "-DSQUARED=1 -DINPUT=0", "add_sums", 1, 50),
    ("patch_sums", "-DSQUARED=0 -DINPUT=0", "sum_images", 4, 36),  # four reads at a time
    ("patch_products", "-DALIGNED=0 -DINPUT=0", "patch_products", 8, 660),  # 256 products
    ("patch_products", "-DALIGNED=1 -DINPUT=0", "patch_products", 8, 540),
]


@each_architecture
@pytest.mark.parametrize(("source_name", "option", "kernel", "reads", "most"), WITHOUT_DIVISIONS)
def test_loops_that_read_single_numbers_have_few_instructions(
    source_name, option, kernel, reads, most, architecture
):
    loops = compile_kernels.loops(source_name)[f"{architecture} {option}"][kernel]
    hot = max(loops, key=lambda loop: (loop.narrow_loads, loop.instructions))
    assert hot.narrow_loads == reads
    assert hot.instructions <= most
    assert hot.local == 0


def test_disassembler_reproduces_loops():
    if nvrtc.disassembler() is None or not nvrtc.installed("sm_90"):
        pytest.skip("no nvdisasm; install the extra 'nvrtc'")
    options = ("-DCOLUMNS=2", "-DPRODUCTS=3")
    known = compile_kernels.loops("pair_products")[compile_kernels.entry(options, "sm_90")]
    assert nvrtc.loops("pair_products", options, "sm_90") == known


def test_loops_are_counted_without_inner_loops():
    listing = """
    .L_x_0:
            /*0000*/                   LDGSTS.E.BYPASS.128 [R1], [R2.64], P0 ;
    .L_x_1:
            /*0010*/                   HMMA.16816.F32 R4, R8, R12, R4 ;
            /*0020*/              @!P1 IADD3 R1, R1, 0x1, RZ ;
            /*0030*/               @P1 BRA `(.L_x_1) ;
            /*0040*/                   LDGSTS.E [R1], [R2.64] ;
            /*0050*/                   LDG.E R1, desc[UR4][R2.64] ;
            /*0060*/                   LDL R1, [R2] ;
            /*0070*/               @P0 BRA `(.L_x_0) ;
            /*0080*/                   EXIT ;
    .L_x_2:
            /*0090*/                   BRA `(.L_x_2);
    """
    assert nvrtc._loops(listing) == [
        nvrtc.Loop(3, 1, 1, 0, 0, 0, 0, 0),
        nvrtc.Loop(5, 0, 0, 1, 1, 0, 1, 1),
    ]


def test_broken_source_raises_compile_error():
    if not nvrtc.installed("sm_90"):
        pytest.skip("no NVRTC; install the extra 'nvrtc'")
    with pytest.raises(nvrtc.CompileError, match="undefined"):
        nvrtc._compiled(source("averages").replace("alpha *", "gamma *"), (), "sm_90")


@each_source
def test_sources_include_no_headers(name):
    """The compiler at run time finds no headers."""
    assert "#include" not in source(name).replace("No #include", "")
