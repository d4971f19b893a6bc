// This file owns the flag that opens files without a name.

package atomicfile

import "golang.org/x/sys/unix"

const unnamed = unix.O_TMPFILE
