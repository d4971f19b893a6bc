// This file owns the arithmetic of scripts.

package megatron

import (
	"math"
	"regexp"
	"strconv"
	"strings"
)

// arithmetic evaluates whole numbers with names of variables. It fails if something is not
// known or cannot be computed.
func (sh *shell) arithmetic(text string) (int, bool) {
	value, sure := known(sh.text(text))
	c := &calculation{sh: sh, rest: value}
	n := c.ternary()
	c.blanks()
	return n, sure && !c.failed && c.rest == ""
}

var computes = regexp.MustCompile(`(?s)^\s*([A-Za-z_]\w*)\s*(?:([-+*/%]?)=([^=].*)|(\+\+|--)\s*)$`)

// let follows an arithmetic command, which may set a variable. A variable whose value
// cannot be computed is not known afterwards.
func (sh *shell) let(text string) truth {
	m := computes.FindStringSubmatch(text)
	if m == nil {
		n, ok := sh.arithmetic(text)
		if !ok {
			return unsure
		}
		return truthOf(n != 0)
	}
	name, op, value := m[1], m[2], m[3]
	if m[4] != "" {
		op, value = m[4][:1], "1"
	}
	if op != "" {
		value = name + op + "(" + value + ")"
	}
	n, ok := sh.arithmetic(value)
	if !ok {
		sh.set(name, []string{commandMark + "$((" + marks.Replace(value) + "))" + commandMark})
		return unsure
	}
	sh.set(name, []string{strconv.Itoa(n)})
	return truthOf(n != 0)
}

// calculation evaluates an expression by precedence. Any mistake sets failed.
type calculation struct {
	sh     *shell
	rest   string
	failed bool
	depth  int
}

func (c *calculation) blanks() { c.rest = strings.TrimLeft(c.rest, " \t\n") }

func (c *calculation) accept(ops ...string) string {
	c.blanks()
	for _, op := range ops {
		if strings.HasPrefix(c.rest, op) {
			c.rest = c.rest[len(op):]
			return op
		}
	}
	return ""
}

func (c *calculation) ternary() int {
	if c.depth++; c.depth > mostDepth {
		c.failed = true
		return 0
	}
	defer func() { c.depth-- }()
	n := c.binary(0)
	if c.accept("?") == "" {
		return n
	}
	yes := c.ternary()
	if c.accept(":") == "" {
		c.failed = true
	}
	if no := c.ternary(); n == 0 {
		return no
	}
	return yes
}

// levels are the operators by precedence, the loosest first. Longer ones come before
// their beginnings.
var levels = [][]string{{"||"}, {"&&"}, {"==", "!="}, {"<=", ">=", "<", ">"}, {"<<", ">>"}, {"+", "-"}, {"*", "/", "%"}}

func (c *calculation) binary(level int) int {
	if level == len(levels) {
		return c.power()
	}
	n := c.binary(level + 1)
	for {
		op := c.accept(levels[level]...)
		if op == "" {
			return n
		}
		n = c.apply(op, n, c.binary(level+1))
	}
}

func (c *calculation) apply(op string, a, b int) int {
	truth := func(is bool) int {
		if is {
			return 1
		}
		return 0
	}
	if abs(a) > math.MaxInt32 || abs(b) > math.MaxInt32 || (op == "/" || op == "%") && b == 0 {
		c.failed = true
		return 0
	}
	switch op {
	case "+":
		return a + b
	case "-":
		return a - b
	case "*":
		return a * b
	case "/":
		return a / b
	case "%":
		return a % b
	case "<<", ">>":
		if c.failed = c.failed || b < 0 || b >= 32; c.failed {
			return 0
		}
		if op == ">>" {
			return a >> b
		}
		return a << b
	case "==":
		return truth(a == b)
	case "!=":
		return truth(a != b)
	case "<":
		return truth(a < b)
	case ">":
		return truth(a > b)
	case "<=":
		return truth(a <= b)
	case ">=":
		return truth(a >= b)
	case "&&":
		return truth(a != 0 && b != 0)
	}
	return truth(a != 0 || b != 0)
}

// power evaluates a ** b, which binds from right to left.
func (c *calculation) power() int {
	base := c.unary()
	if c.accept("**") == "" {
		return base
	}
	if c.depth++; c.depth > mostDepth {
		c.failed = true
		return 0
	}
	defer func() { c.depth-- }()
	exponent := c.power()
	n := math.Pow(float64(base), float64(exponent))
	if exponent < 0 || math.Abs(n) > math.MaxInt32 {
		c.failed = true
		return 0
	}
	return int(n)
}

// wholeNumber is a number in decimal, octal or hexadecimal, as bash writes them.
var wholeNumber = regexp.MustCompile(`^-?(0[xX][0-9a-fA-F]+|[0-9]+)$`)

func (c *calculation) unary() int {
	if c.depth++; c.depth > mostDepth {
		c.failed = true
		return 0
	}
	defer func() { c.depth-- }()
	switch c.accept("(", "-", "+", "!") {
	case "(":
		n := c.ternary()
		if c.accept(")") == "" {
			c.failed = true
		}
		return n
	case "-":
		return -c.unary()
	case "+":
		return c.unary()
	case "!":
		return c.apply("==", c.unary(), 0)
	}
	end := nameLength(c.rest)
	word := c.rest[:end]
	c.rest = c.rest[end:]
	if isName(word) {
		values, set := c.sh.get(word)
		value, sure := known(strings.Join(values, " "))
		if c.failed = c.failed || !sure; value == "" {
			value = "0"
			c.failed = c.failed || !set
		}
		word = strings.TrimSpace(value)
	}
	n, err := strconv.ParseInt(word, 0, 64)
	if err != nil || !wholeNumber.MatchString(word) || n < -math.MaxInt32 || n > math.MaxInt32 {
		c.failed = true
		return 0
	}
	return int(n)
}
