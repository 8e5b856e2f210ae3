// The path from the PVH entry, and from a start-up IPI, to 64-bit Rust; and the interrupt entries.
//
// The host may emulate ring 0 one instruction at a time, so this code does little: it maps the
// first 4 GiB with 2 MiB pages, and Rust maps the rest.

.section .note.Xen, "a", @note
.balign 4
    .long 4
    .long 8
    .long 18                    // XEN_ELFNOTE_PHYS32_ENTRY
    .asciz "Xen"
    .quad pvh_start

.section .boot, "ax", @progbits
.code32
.globl pvh_start
pvh_start:
    cli
    cld
    movl $boot_stack_top, %esp
    xorl %eax, %eax
    movl $bss_start, %edi
    movl $bss_end, %ecx
    subl %edi, %ecx
    shrl $2, %ecx
    rep stosl

    movl $page_pdpt + 7, page_pml4
    movl $page_directories + 7, page_pdpt
    movl $page_directories + 0x1007, page_pdpt + 8
    movl $page_directories + 0x2007, page_pdpt + 16
    movl $page_directories + 0x3007, page_pdpt + 24
    movl $page_directories, %edi
    movl $0x87, %eax            // present, writable, user, 2 MiB
    movl $2048, %ecx
1:  movl %eax, (%edi)
    movl $0, 4(%edi)
    addl $8, %edi
    addl $0x200000, %eax
    decl %ecx
    jnz 1b
    orl $0x18, page_directories + 0xfee00000 / 0x200000 * 8   // the APIC: uncached

    movl %ebx, %edi             // start info, for boot_main
    movl $boot_main, %esi
    jmp enter_long_mode

// Entry of an application processor, from the trampoline.
start_ap:
    movl $0x10, %eax
    movl %eax, %ds
    movl %eax, %es
    movl %eax, %ss
    movl $1, %eax
    cpuid
    shrl $24, %ebx              // APIC id: which vCPU this is
    cmpl $32, %ebx
    jae 2f
    movl ap_stacks(,%ebx,4), %esp
    testl %esp, %esp
    jz 2f
    movl %ebx, %edi
    movl $ap_main, %esi
    jmp enter_long_mode
2:  cli
    hlt
    jmp 2b

// Switches to 64-bit mode. %esi is the function to enter, %edi its argument, %esp its stack.
enter_long_mode:
    movl $0x620, %eax           // PAE, OSFXSR, OSXMMEXCPT
    movl %eax, %cr4
    movl $page_pml4, %eax
    movl %eax, %cr3
    movl $0xc0000080, %ecx
    rdmsr
    orl $0x100, %eax            // long mode
    wrmsr
    lgdt gdt_pointer
    movl $0x80000033, %eax      // paging, NE, ET, MP, protection
    movl %eax, %cr0
    ljmp $0x08, $3f
.code64
3:  movl $0x10, %eax
    movl %eax, %ds
    movl %eax, %es
    movl %eax, %ss
    movl %eax, %fs
    movl %eax, %gs
    movl %esp, %esp
    movl %edi, %edi
    movl %esi, %eax
    callq *%rax
4:  cli
    hlt
    jmp 4b

// Copied to TRAMPOLINE and started in real mode with CS:IP = TRAMPOLINE >> 4 : 0.
.globl trampoline_start, trampoline_end
.set TRAMPOLINE, 0x8000
.code16
trampoline_start:
    cli
    xorw %ax, %ax
    movw %ax, %ds
    lgdtl TRAMPOLINE + (trampoline_gdt - trampoline_start)
    movl %cr0, %eax
    orl $1, %eax
    movl %eax, %cr0
    ljmpl $0x18, $start_ap
.balign 4
trampoline_gdt:
    .word 0x37
    .long gdt
trampoline_end:

.code64
// Exceptions: each entry pushes its vector, after a zero if the processor pushes no error code.
.balign 16
.globl fault_entries
fault_entries:
.set vector, 0
.rept 32
.balign 16
.set has_code, (vector == 8) || ((vector >= 10) && (vector <= 14)) || (vector == 17)
.set has_code, has_code || (vector == 21) || (vector == 29) || (vector == 30)
.if !has_code
    pushq $0
.endif
    pushq $vector
    jmp fault_common
.set vector, vector + 1
.endr
fault_common:
    movq %rsp, %rdi
    andq $-16, %rsp
    callq fault_main
    hlt

.globl timer_entry_x2apic, timer_entry_xapic, spurious_entry
timer_entry_x2apic:
    pushq %rax
    pushq %rcx
    pushq %rdx
    movl $0x80b, %ecx           // end of interrupt
    xorl %eax, %eax
    xorl %edx, %edx
    wrmsr
    popq %rdx
    popq %rcx
    popq %rax
    iretq
timer_entry_xapic:
    pushq %rax
    movl $0xfee000b0, %eax
    movl $0, (%rax)
    popq %rax
    iretq
spurious_entry:
    iretq

// Requests of ring 3: %rsi is the request, %rdi its argument; %rax, %rcx and %rdx are clobbered.
// The request arrives as an invalid instruction, because not every host passes software interrupts
// on to its guest.
.globl request_from_ring3
request_from_ring3:
    ud2
    ret

.globl invalid_entry
invalid_entry:
    cmpq $request_from_ring3, (%rsp)
    jne 5f
    addq $2, (%rsp)             // past the ud2
    callq request
    iretq
5:  pushq $0
    pushq $6
    jmp fault_common

// The same as a function, for a loop that runs in ring 0. Interrupts are off outside of it.
.globl request
request:
    cmpl $1, %esi
    je 6f
    ja 7f
    jmp *idle_function(%rip)
6:  cli                         // 1: idle forever
    hlt
    jmp 6b
7:  lidt no_idt(%rip)           // 2: a triple fault
    ud2

.globl idle_deadline, idle_x2apic, idle_xapic
idle_deadline:
    movl $0x6e0, %ecx           // TSC deadline
    movl %edi, %eax
    movq %rdi, %rdx
    shrq $32, %rdx
    wrmsr
    sti
    hlt
    cli
    ret
idle_x2apic:
    movl $0x838, %ecx           // initial count
    movl %edi, %eax
    xorl %edx, %edx
    wrmsr
    sti
    hlt
    cli
    ret
idle_xapic:
    movl $0xfee00380, %eax
    movl %edi, (%rax)
    sti
    hlt
    cli
    ret

// Enters ring 3. %rdi is the argument, %rsi the function, %rdx its stack.
.globl enter_ring3
enter_ring3:
    movl $0x23, %eax
    movl %eax, %ds
    movl %eax, %es
    pushq %rax
    pushq %rdx
    pushq $2
    pushq $0x2b
    pushq %rsi
    iretq

.data
.balign 16
.globl gdt
gdt:
    .quad 0
    .quad 0x00af9b000000ffff    // 0x08 code, 64 bits
    .quad 0x00cf93000000ffff    // 0x10 data
    .quad 0x00cf9b000000ffff    // 0x18 code, 32 bits, on the way
    .quad 0x00cff3000000ffff    // 0x20 data, ring 3
    .quad 0x00affb000000ffff    // 0x28 code, 64 bits, ring 3
    .fill 64, 8, 0              // 0x30 a TSS for each vCPU
gdt_end:
.balign 8
    .word 0, 0, 0
gdt_pointer:
    .word gdt_end - gdt - 1
    .quad gdt
no_idt:
    .word 0
    .quad 0
.balign 8
.globl idle_function
idle_function:
    .quad idle_deadline
.globl ap_stacks
ap_stacks:
    .fill 32, 4, 0

.bss
.balign 4096
page_pml4:
    .skip 4096
.globl page_pdpt
page_pdpt:
    .skip 4096

.section .uncleared, "aw", @nobits
.balign 4096
page_directories:
    .skip 4 * 4096
    .skip 16384
boot_stack_top:
.text
